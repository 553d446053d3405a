"""Rollouts and evaluations on disk: the rows as they were, readable at any moment."""

import pyarrow.parquet as pq
import pytest
import torch

from prefect_rlhf.engines.compute import Context
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.tasks.data.rollouts import record_rollouts
from prefect_rlhf.tasks.rl.evaluation import record_evaluation
from prefect_rlhf.tasks.settings import Settings
from tests.tasks.small_tokenizer import ids, save_small_tokenizer

ROLLOUT = Batch(
    {
        "tokens": [torch.tensor(ids("a film is good </s>")), torch.tensor(ids("it is bad"))],
        "prompt_length": [torch.tensor(2), torch.tensor(2)],
        "logprobs": [torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.25])],
    }
)
SCORES = Batch({"scores": [torch.tensor(1.5), torch.tensor(-2.0)]})
ADVANTAGES = Batch({"advantages": [torch.tensor([0.5, 1.0, 2.0]), torch.tensor([-1.0])]})


@pytest.fixture
def context(tmp_path):
    tokenizer = save_small_tokenizer(tmp_path / "tokenizer")
    return Context(3, tmp_path / "run", tokenizer, row_ids=(41, 7), versions={"actor": 2, "ref": 0})


def test_a_steps_rollouts_are_a_parquet_file(context):
    record_rollouts.function(ROLLOUT, SCORES, ADVANTAGES, Settings(), context)
    assert pq.read_table(context.run_dir / "rollouts" / "step-000003.parquet").to_pylist() == [
        {
            "prompt": "a film",
            "response": "is good",
            "tokens": ids("a film is good </s>"),
            "logprobs": [-1.0, -2.0, -0.5],
            "reward": 1.5,
            "advantages": [0.5, 1.0, 2.0],
            "step": 3,
            "weight_version": 2,
            "row_id": 41,
        },
        {
            "prompt": "it is",
            "response": "bad",
            "tokens": ids("it is bad"),
            "logprobs": [-0.25],
            "reward": -2.0,
            "advantages": [-1.0],
            "step": 3,
            "weight_version": 2,
            "row_id": 7,
        },
    ]


def test_no_half_written_file_has_the_name_of_a_whole_one(context, monkeypatch):
    """A writer that dies leaves nothing that a reader of *.parquet would open."""

    def dies_in_the_middle(table, path):
        path.write_bytes(b"PAR1")
        raise OSError("disk full")

    monkeypatch.setattr("prefect_rlhf.tasks.data.rollouts.pq.write_table", dies_in_the_middle)
    with pytest.raises(OSError, match="disk full"):
        record_rollouts.function(ROLLOUT, SCORES, ADVANTAGES, Settings(), context)
    assert list(context.run_dir.rglob("*.parquet")) == []


def test_an_evaluation_keeps_its_responses_and_reports_their_means(context):
    made = record_evaluation.function(ROLLOUT, SCORES, Settings(), context)
    assert made.metrics == {"score": -0.25, "response_tokens": 2.0}
    table = pq.read_table(context.run_dir / "evaluation" / "step-000003.parquet")
    assert table["response"].to_pylist() == ["is good", "bad"]
    assert table["reward"].to_pylist() == [1.5, -2.0]
