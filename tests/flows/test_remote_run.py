"""A run whose model, data and output are all in a bucket, over HTTP against moto's S3."""

import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from prefect_rlhf.files.remote_path import CACHE_VARIABLE, local_path
from prefect_rlhf.files.storage import patience
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.flows.sft import sft
from prefect_rlhf.flows.training import log
from prefect_rlhf.tasks.checkpoints import folders
from tests.support.object_stores import BUCKET, names, put, s3_server
from tests.support.runs import end
from tests.support.tiny import make_model
from tests.tasks.data.stored import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.usefixtures("prefect")]


@pytest.fixture
def server(own_home, monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    with s3_server(monkeypatch) as server:
        yield server


@pytest.fixture
def s3(server, tmp_path):
    """A bucket with a model and three chats, which lie in the folder `in` too."""
    answers = ["the best film", "a bad film", "good"]
    (tmp_path / "in").mkdir()
    json_lines(tmp_path / "in" / "chats.jsonl", *({"prompt": "what is it", "completion": each} for each in answers))
    make_model(tmp_path / "in" / "actor")
    put(f"s3://{BUCKET}", tmp_path / "in")
    return f"s3://{BUCKET}"


def run(place, **changes):
    given = {
        "chats": {"path": f"{place}/chats.jsonl", "split_column": None},
        "held_out": {"path": f"{place}/chats.jsonl", "split_column": None},
        "actor": {"path": f"{place}/actor"},
        "algo": {"batch_size": 2, "optimizer": {"lr": 1e-2}},
        "checkpoint_every": 1,
        "keep_checkpoints": 1,
        "output_dir": f"{place}/runs",
        **changes,
    }
    state = end(sft, given)
    assert state.is_completed(), state.message
    return state.result()


def test_a_run_resumes_from_a_bucket_on_another_machine_bit_for_bit(s3, tmp_path):
    """The machine's copies are all gone in between."""
    whole = load_file(Path(run(tmp_path / "in", steps=3)["models"]["actor"]) / "model.safetensors")

    first = run(s3, steps=2)
    assert first["models"]["actor"] == f"{first['run_dir']}/actor" and first["run_dir"].startswith(f"{s3}/runs/")
    written = names(first["run_dir"])
    assert {"actor/config.json", "metrics.jsonl", "plan.yaml", "result.json"} <= {*written}
    steps = {name.split("/")[1] for name in written if name.startswith("checkpoints/")}
    assert steps == {"step-000002"}, "one is kept"

    shutil.rmtree(tmp_path / "cache")
    resumed = run(s3, steps=3, resume_from="latest")
    assert local_path(resumed["run_dir"], "run").joinpath("metrics.jsonl").read_text().count("\n") == 3
    shutil.rmtree(tmp_path / "cache")
    trained = load_file(model_folder(resumed["models"]["actor"], "actor.path") / "model.safetensors")
    assert trained.keys() == whole.keys() and all(trained[name].equal(whole[name]) for name in whole)


def test_a_bucket_that_is_away_in_the_middle_of_a_run_is_waited_for_and_the_runs_log_says_so(
    s3, server, monkeypatch, tmp_path
):
    """It goes with the first checkpoint, and comes back in the third pause."""
    lines, pauses, publish_checkpoint = [], [], folders.publish_checkpoint

    def publish_and_go(folder):
        publish_checkpoint(folder)
        if not pauses:
            server.stop()

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            server.start()

    monkeypatch.setattr(folders, "publish_checkpoint", publish_and_go)
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    monkeypatch.setattr(log, "log_warning", lines.append)
    ended = run(s3, steps=3)
    assert {"actor/config.json", "metrics.jsonl"} <= {*names(ended["run_dir"])}
    waits = [line for line in lines if f"for a store that answers at {server.endpoint}" in line]
    assert len(waits) == len(pauses) >= 3 and all(line.startswith(f"{s3}/") for line in waits)
