"""GRPO and ReMax with Python rewards: real Prefect, Megatron-core and vLLM, a tiny model."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.remax import remax
from prefect_rlhf.tasks.running.journal import read_spans
from prefect_rlhf.tasks.trackers.names import own_name
from tests.support.runs import completed, end, read_lines
from tests.support.trackers_read_back import READ_BACK, kept

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect", "own_home")]
REWARDS = Path(__file__).parent / "rewards.py"
FUNCTIONS = {
    "shorter": {"function": f"{REWARDS}:shorter", "weight": 0.5},
    "vowels": {"function": f"{REWARDS}:vowels", "signature": "trl"},
}


@pytest.fixture
def grouped(parameters, tmp_path):
    """A run of GRPO on prompts with columns of their own, without a reward model and a reference."""
    table = pq.read_table(parameters["prompts"]["path"])
    numbers = list(range(table.num_rows))
    table = table.append_column("number", pa.array(numbers)).append_column(
        "hint", pa.array([f"hint {n}" for n in numbers])
    )
    pq.write_table(table, tmp_path / "prompts.parquet")
    kept = ("held_out", "actor", "output_dir", "steps", "plan")
    changed = {name: parameters[name] for name in kept if name in parameters}
    prompts = parameters["prompts"] | {"path": str(tmp_path / "prompts.parquet")}
    held_out = parameters["held_out"] | {"path": str(tmp_path / "prompts.parquet")}
    algo = {"batch_size": 4, "samples_per_prompt": 2, "kl": {"coefficient": 0.0}, "sampling": {"max_new_tokens": 6}}
    return changed | {"prompts": prompts, "held_out": held_out, "reward": {"functions": FUNCTIONS}, "algo": algo}


def test_scores_are_the_weighted_sum_of_functions_that_see_their_rows_columns(grouped):
    """And each one's mean is a metric; the reward of a group's rows is that of their texts.

    Trackers of that run show its metrics and its rows.
    """
    run_dir = completed(grpo, grouped | {"tracking": {"report_to": [*READ_BACK], "names": "own", "samples": 2}})
    table = pq.read_table(run_dir / "rollouts" / "step-000001.parquet").to_pydict()
    assert len(table["prompt"]) == 8
    assert [table["prompt"][row] == table["prompt"][row + 1] for row in range(0, 8, 2)] == [True] * 4
    expected = [-0.5 * len(text) + sum(letter in "aeiou" for letter in text) for text in table["response"]]
    assert table["reward"] == pytest.approx(expected)
    first = read_lines(run_dir / "metrics.jsonl")[0]
    assert first["score.shorter"] == pytest.approx(-sum(map(len, table["response"])) / 8)
    assert first["score.failed"] == 0
    assert {"score", "actor_generate"} <= {span.call for span in read_spans(run_dir)}
    lines = {
        line["step"]: line
        for name in ("evaluation.jsonl", "metrics.jsonl")  # step 0 is an evaluation alone
        for line in read_lines(run_dir / name)
    }
    for tracker, read_back in READ_BACK.items():
        scalars, tables = read_back(run_dir)
        shown = {(name, step): value for name, step, value in scalars}
        assert shown == {
            (own_name(name), step): kept(tracker, value)
            for step, line in lines.items()
            for name, value in line.items()
            if name != "step"
        }
        assert [row[1] for row in tables["samples/rollouts", 1][1:]] == table["response"][:2]


@pytest.mark.all
def test_remax_scores_the_sampled_and_the_greedy_response(grouped):
    algo = {key: value for key, value in grouped["algo"].items() if key != "samples_per_prompt"}
    completed(remax, grouped | {"algo": algo | {"kl": {"coefficient": 0.0, "kind": "fixed"}}})


@pytest.mark.parametrize(
    ("function", "says"),
    [
        pytest.param(
            "raises",
            r"raises \(.*\) failed on 1 of [48] rows, at most 10% may; .*: no reward for \d+ \(.*rewards.py:18 in",
            marks=pytest.mark.all,  # test_rows_that_fail.py has the reason
        ),
        ("missing", r"^InvalidInput: reward.functions.missing: got .*missing"),
    ],
)
def test_a_reward_that_cannot_score_ends_the_run_in_one_line(grouped, function, says):
    functions = {function: {"function": f"{REWARDS}:{function}"}}
    state = end(grpo, grouped | {"reward": {"functions": functions}})
    assert state.is_failed()
    assert "\n" not in state.message
    assert re.search(says, state.message), state.message
