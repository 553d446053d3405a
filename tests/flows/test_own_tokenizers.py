"""A judge with a tokenizer of its own: what scores its verdicts, and what is recorded, is the text that it wrote."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from tests.support.runs import completed, leased, plan_file
from tests.support.tiny import make_model
from tests.tasks.small_tokenizer import save_bpe_tokenizer

SEEN = """
import json

def seen(row):
    with open({file!r}, "a") as lines:
        lines.write(json.dumps([row["question"], row["prompt"], row["response"], row["response_ids"]]) + "\\n")
    return float(len(row["response"]))
"""


@pytest.mark.all
@pytest.mark.slow
@pytest.mark.usefixtures("prefect", "own_home")
def test_a_score_and_a_record_have_the_text_that_the_generating_role_wrote(parameters, tmp_path):
    """The ids of both tokenizers differ, so each decodes the other's tokens to another text."""
    flow = find_flow(f"{Path(__file__).parent / 'judge_of_its_own.py'}:judged")
    judge = make_model(tmp_path / "judge", vocab=320)
    save_bpe_tokenizer(tmp_path / "judge", ["Question: what is it Answer: the best film Grade: good bad"])
    (tmp_path / "rewards.py").write_text(SEEN.format(file=str(tmp_path / "seen.jsonl")))
    names = (
        "actor_generate",
        "question_and_answer",
        "verdict",
        "score",
        "above_the_judges_mean",
        "record_rollouts",
        "record_evaluation",
    )
    models = ("actor_generate", "verdict", "actor_train")
    engines = {name: f"0 engine={'megatron' if name in models else 'python'}" for name in (*names, "actor_train")}
    given = {name: parameters[name] for name in ("actor", "output_dir")} | {
        "prompts": parameters["prompts"] | {"columns": {"question": "prompt"}},
        "judge": {"path": judge},
        "reward": {"functions": {"seen": {"function": f"{tmp_path / 'rewards.py'}:seen"}}},
        "steps": 1,
        "plan": str(plan_file(engines, tmp_path / "alone.json", ())),
    }
    with leased(1):
        run = completed(flow, given)
    own, others = (AutoTokenizer.from_pretrained(path) for path in (judge, parameters["actor"]["path"]))
    verdicts, answers = (pq.read_table(run / name / "step-000001.parquet").to_pylist() for name in FOLDERS)
    for answer, verdict in zip(answers, verdicts, strict=True):
        said = others.decode(answer["tokens"], skip_special_tokens=True)
        assert said == f"{answer['prompt']} {answer['response']}".strip()
        assert verdict["prompt"] == f"Question: {answer['prompt']} Answer: {answer['response']} Grade:"
        whole = own.decode(verdict["tokens"], skip_special_tokens=True)
        assert whole == verdict["prompt"] + verdict["response"]
        assert others.decode(verdict["tokens"], skip_special_tokens=True) != whole
    scored = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()[-len(verdicts) :]]
    assert [one[1:3] for one in scored] == [[verdict["prompt"], verdict["response"]] for verdict in verdicts]
    assert [own.decode(one[3], skip_special_tokens=True) for one in scored] == [one[2] for one in scored]


FOLDERS = ("rollouts", "evaluation")
