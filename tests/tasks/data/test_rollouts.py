"""Rollouts and evaluations on disk: the rows as they were, readable at any moment."""

import math
import os
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch

from prefect_rlhf.engines.compute import Context
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import InvalidInput, OutputFailed
from prefect_rlhf.tasks.data.rollouts import (
    carry_over_rollouts,
    record_rollouts,
    remove_rollouts_after,
    text_columns,
    write_rows,
)
from prefect_rlhf.tasks.rl.evaluation.held_out import record_evaluation
from prefect_rlhf.tasks.settings import Settings
from tests.tasks.small_tokenizer import ids, save_letter_tokenizer, save_small_tokenizer

ROLLOUT = {
    "tokens": [torch.tensor(ids("a film is good </s>")), torch.tensor(ids("it is bad"))],
    "prompt_length": [torch.tensor(2), torch.tensor(2)],
    "logprobs": [torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.25])],
}
SCORES = Batch({"scores": [torch.tensor(1.5), torch.tensor(-2.0)]})
ADVANTAGES = Batch({"advantages": [torch.tensor([0.5, 1.0, 2.0]), torch.tensor([-1.0])]})


@pytest.fixture
def context(tmp_path):
    tokenizer = save_small_tokenizer(tmp_path / "tokenizer")
    return Context(
        3, tmp_path / "run", tokenizer, row_ids=(41, 7), versions={"ref": 0, "pupil": 2}, generated_by="pupil"
    )


@pytest.fixture
def rollout(context):
    return Batch(ROLLOUT, written_by=context.tokenizer)


def test_each_steps_rollouts_are_a_parquet_file(context, rollout):
    """Their weight version is that of the role which generated them, whatever its name."""
    record_rollouts.function(rollout, SCORES, ADVANTAGES, Settings(), context)
    assert pq.read_table(context.run_dir / "rollouts" / "step-000003.parquet").to_pydict() == {
        "prompt": ["a film", "it is"],
        "response": ["is good", "bad"],
        "user_message": ["a film", "it is"],
        "tokens": [ids("a film is good </s>"), ids("it is bad")],
        "logprobs": [[-1.0, -2.0, -0.5], [-0.25]],
        "reward": [1.5, -2.0],
        "advantages": [[0.5, 1.0, 2.0], [-1.0]],
        "step": [3, 3],
        "weight_version": [2, 2],
        "row_id": [41, 7],
    }


@pytest.mark.parametrize("scored", [1.5, math.nan])
def test_an_unscored_rows_reward_is_null_and_the_column_stays_one_of_numbers(context, rollout, scored):
    """NaN is above every number in SQL: `reward > 0.5` would count a row that has no reward."""
    scores = Batch({"scores": [torch.tensor(math.nan), torch.tensor(scored)]})
    record_rollouts.function(rollout, scores, ADVANTAGES, Settings(), context)
    found = pq.read_table(context.run_dir / "rollouts" / "step-000003.parquet").column("reward")
    assert found.type == "double" and found.to_pylist() == [None, None if math.isnan(scored) else scored]


def test_a_partial_file_never_has_its_final_name(context, rollout, monkeypatch):
    """A writer that dies leaves nothing that a reader of *.parquet would open."""

    def dies_in_the_middle(table, path):
        path.write_bytes(b"PAR1")
        raise OSError("disk full")

    monkeypatch.setattr("pyarrow.parquet.write_table", dies_in_the_middle)
    with pytest.raises(OutputFailed, match="disk full"):
        record_rollouts.function(rollout, SCORES, ADVANTAGES, Settings(), context)
    assert list(context.run_dir.rglob("*.parquet")) == []


def test_an_evaluation_keeps_its_responses_and_reports_their_means(context, rollout):
    made = record_evaluation.function(rollout, SCORES, Settings(), context)
    assert made.metrics == {"score": -0.25, "unscored": 0.0, "response_tokens": 2.0}
    table = pq.read_table(context.run_dir / "evaluation" / "step-000003.parquet")
    assert table["response"].to_pylist() == ["is good", "bad"]
    assert table["reward"].to_pylist() == [1.5, -2.0]


def written(run_dir):
    """The files of rows in a run's folder."""
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.rglob("*.parquet"))


def test_rows_are_decoded_only_with_the_tokenizer_that_wrote_them(context, rollout, tmp_path):
    """Another folder with the same ids is as good, and so is any for rows whose tokenizer is not known."""
    text = {"prompt": ["a film", "it is"], "response": ["is good", "bad"]}
    assert text_columns(rollout) == text_columns(rollout, save_small_tokenizer(tmp_path / "same")) == text
    with pytest.raises(InvalidInput, match=r"tokenizer of text_columns: got '.*letters', expected .*tokenizer, which"):
        text_columns(rollout, save_letter_tokenizer(tmp_path / "letters"))
    assert text_columns(Batch(ROLLOUT), context.tokenizer) == text


@pytest.fixture
def earlier(context):
    """The folder of a run of 4 steps, which evaluated before, after step 2 and after the last."""
    for step in range(1, 5):
        write_rows({"reward": [0.5, float(step)]}, "rollouts", replace(context, step=step))
    for step in (0, 2, 4):
        write_rows({"reward": [0.0, 1.0]}, "evaluation", replace(context, step=step))
    (context.run_dir / "rollouts" / "step-mine.parquet").write_text("a person's own")
    return context.run_dir


@pytest.mark.parametrize("links", [True, False])
def test_a_resumed_run_has_every_step_once(earlier, tmp_path, monkeypatch, links):
    """Those until its checkpoint are the earlier run's, also where a file can have no second name."""
    if not links:
        monkeypatch.setattr(os, "link", lambda source, target: (_ for _ in ()).throw(OSError("not supported")))
    later = tmp_path / "later"
    carried = [
        *("evaluation/step-000000.parquet", "evaluation/step-000002.parquet"),
        *("rollouts/step-000001.parquet", "rollouts/step-000002.parquet"),
    ]
    assert carry_over_rollouts(earlier, later, last_step=2) == 4
    assert written(later) == carried
    assert all((later / name).read_bytes() == (earlier / name).read_bytes() for name in carried)
    assert all((later / name).samefile(earlier / name) == links for name in carried)


def test_a_runs_existing_files_are_not_replaced(earlier, context):
    again = replace(context, run_dir=context.run_dir.with_name("later"), step=1)
    own = write_rows({"reward": [7.0, 7.0]}, "rollouts", again)
    assert carry_over_rollouts(earlier, again.run_dir, last_step=2) == 3
    assert pq.read_table(own)["reward"].to_pylist() == [7.0, 7.0]


def test_a_run_restarted_in_its_folder_removes_steps_that_it_repeats(earlier):
    kept = [
        *("evaluation/step-000000.parquet", "evaluation/step-000002.parquet"),
        *("rollouts/step-000001.parquet", "rollouts/step-000002.parquet"),
    ]
    assert remove_rollouts_after(earlier, last_step=2) == 3
    assert written(earlier) == [*kept, "rollouts/step-mine.parquet"]


def test_removing_a_later_runs_rows_keeps_the_earlier_runs_rows(earlier, tmp_path):
    """They may be the same files under two names."""
    before = written(earlier)
    carry_over_rollouts(earlier, tmp_path / "later", last_step=4)
    remove_rollouts_after(tmp_path / "later", last_step=-1)
    assert written(tmp_path / "later") == []
    assert written(earlier) == before
