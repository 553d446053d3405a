"""Runs that evaluate on named sets: what they record, and that a resume and another plan change none of it."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.tasks.rl.evaluation.estimators import avg, maj, pass_at
from prefect_rlhf.tasks.rl.evaluation.intervals import interval
from tests.support.runs import completed, leased, read_lines

REWARDS = Path(__file__).parent / "rewards.py"
LAST_WORD = {"functions": {"last_word": {"function": f"{REWARDS}:last_word"}}}


@pytest.fixture
def with_sets(parameters):
    """GRPO without a reference; a set of four samples to each prompt at step 0 and every step, and a greedy one."""
    prompts = parameters["held_out"]
    sampled = {"data": prompts, "samples": 4, "reward": LAST_WORD, "max_new_tokens": 6, "every": 1}
    return {
        **{name: parameters[name] for name in ("prompts", "held_out", "actor", "output_dir", "steps")},
        "reward": LAST_WORD,
        "algo": {"batch_size": 4, "samples_per_prompt": 2, "kl": {"coefficient": 0.0}, "evaluate_every": 2},
        "evaluation": {"words": sampled, "greedy": {"data": {**prompts, "split": "train"}}},
        "limits": {"evaluation.words.pass@4": 0.0},
        "best_metric": "evaluation.words.pass@2",
        "checkpoint_every": 1,
    }


@pytest.mark.slow
@pytest.mark.usefixtures("prefect", "own_home")
def test_a_run_records_each_set_with_the_metrics_of_its_rows(with_sets):
    """The estimators on the recorded rows give the recorded metrics; the best model is of one of them."""
    run_dir = completed(grpo, with_sets)
    lines = {line["step"]: line for line in read_lines(run_dir / "evaluation.jsonl")}
    assert {step for step, line in lines.items() if "evaluation_greedy.avg@1" in line} == {0, 2}
    for step in (0, 1, 2):
        rows = pq.read_table(run_dir / "evaluation_words" / f"step-{step:06d}.parquet").to_pydict()
        assert rows["sample"] == [0, 1, 2, 3] * 4 and rows["prompt"][0] == rows["prompt"][3]
        scores, answers = (np.array(rows[name]).reshape(-1, 4) for name in ("reward", "answer"))
        expected = {"avg@4": avg(scores), "maj@4": maj(scores, answers)}
        expected |= {f"pass@{k}": pass_at(scores, k, 1.0) for k in (1, 2, 4)}
        for name in ("response_tokens", "truncated"):
            expected[name] = avg(np.array(rows[name]).reshape(-1, 4))
        for name, values in expected.items():
            found = [lines[step][f"evaluation_words.{name}{end}"] for end in ("", "_low", "_high")]
            mean = interval(values)
            assert mean is not None and found == [mean.mean, mean.low, mean.high]
        assert lines[step]["evaluation_words.unscored"] == 0
    assert len(set(rows["response"])) > 1, "samples differ"


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.usefixtures("prefect", "own_home")
def test_a_resume_and_another_plan_record_the_same_evaluation(with_sets):
    """Metrics and their intervals, bit for bit: the same answers, and draws that do not depend on devices."""
    plain = {name: value for name, value in with_sets.items() if name not in ("limits", "best_metric")}
    plain["actor"] = plain["actor"] | {"dtype": "float32"}
    whole = read_lines(completed(grpo, plain) / "evaluation.jsonl")
    first = completed(grpo, plain | {"steps": 1})
    resumed = completed(grpo, plain | {"resume_from": str(first)})
    with leased(2):
        halves = completed(grpo, plain)
    for other in (resumed, halves):
        again = {line["step"]: line for line in read_lines(other / "evaluation.jsonl")}
        for line in (line for line in whole if line["step"] in (0, 2)):
            found = {name: value for name, value in again[line["step"]].items() if not name.endswith("seconds")}
            assert found == {name: line[name] for name in found}
