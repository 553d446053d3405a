"""A run whose models and data are on the Hub, from a stand-in: the commit that it read stays that of the run."""

import json
from pathlib import Path

import pytest

from prefect_rlhf.errors.errors import RankLost
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.training import run as training_run
from prefect_rlhf.tasks.checkpoints.folders import newest_checkpoint
from tests.support.hub_stand_in import in_this_process, stand_in
from tests.support.runs import end, read_lines
from tests.support.tiny import make_model, make_pairs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@pytest.fixture
def hub(own_home, tmp_path):
    """A model in two repositories, and pairs of answers."""
    make_model(tmp_path / "model")
    make_pairs(tmp_path / "pairs.parquet")
    with stand_in() as hub, in_this_process(hub, tmp_path / "hf"):
        hub.add("acme/tiny", tmp_path / "model")
        hub.add("datasets/acme/pairs", {"data/pairs.parquet": (tmp_path / "pairs.parquet").read_bytes()})
        yield hub


def given(folder: Path, **changes) -> dict:
    pairs = "hf://datasets/acme/pairs/data/pairs.parquet"
    return {
        "pairs": {"path": pairs},
        "held_out": {"path": pairs, "split": "held_out"},
        "actor": {"path": "acme/tiny", "dtype": "float32"},
        "ref": {"path": "acme/tiny@main", "dtype": "float32"},
        "algo": {"batch_size": 4},
        "checkpoint_every": 1,
        "output_dir": str(folder / "runs"),
        **changes,
    }


@pytest.mark.all  # the next test starts again
def test_a_resumed_run_reads_its_checkpoints_commits_even_if_main_has_moved(hub, tmp_path):
    """Newer weights of the reference would be refused, and newer pairs would give other losses."""
    whole = end(dpo, given(tmp_path / "whole", steps=2)).result()
    first = end(dpo, given(tmp_path, steps=1)).result()
    commits = {
        "hf://acme/tiny@main": hub.repositories["acme/tiny"].branches["main"],
        "hf://datasets/acme/pairs@main": hub.repositories["datasets/acme/pairs"].branches["main"],
    }
    assert json.loads((Path(first["run_dir"]) / "hub_commits.json").read_text()) == commits
    assert newest_checkpoint(tmp_path / "runs").manifest.lineage.commits == commits

    make_model(tmp_path / "newer", hidden=128)
    hub.add("acme/tiny", tmp_path / "newer")
    hub.add("datasets/acme/pairs", {"data/pairs.parquet": b"no rows"})
    hub.requests.clear()
    state = end(dpo, given(tmp_path, steps=2, resume_from="latest"))
    assert state.is_completed(), state.message
    assert hub.requests == []
    resumed = state.result()
    losses = [
        [line["actor_train.loss"] for line in read_lines(Path(run["run_dir"]) / "metrics.jsonl")]
        for run in (whole, resumed)
    ]
    assert losses[0] == losses[1]


def test_a_run_that_starts_again_before_its_first_checkpoint_reads_the_commits_of_its_first_attempt(
    hub, tmp_path, monkeypatch
):
    """Its folder has them, once its plan is chosen; the branch may have moved meanwhile."""
    read = []

    def train_in(run_dir, prepared, report, moves):
        read.append(prepared.request.lineage.commits)
        training_run.open_journal(run_dir, prepared, report.later)
        if len(read) == 1:
            hub.add("acme/tiny", {"README.md": b"moved"})
            raise RankLost("rank 0 died")
        return {"run_dir": str(run_dir), "models": {}}

    monkeypatch.setattr(training_run, "train_in", train_in)
    monkeypatch.setattr(dpo, "retries", 1)
    state = end(dpo, given(tmp_path, steps=2))
    assert state.is_completed(), state.message
    assert read[0] == read[1]
    assert read[0]["hf://acme/tiny@main"] != hub.repositories["acme/tiny"].branches["main"]
