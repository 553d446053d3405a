"""Runs killed in the middle of a play: rows begin again with the same tokens, and the weights are equal."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prefect_rlhf.flows.grpo import grpo
from tests.support.plan_matrix import COMPUTATIONS_OF_GRPO
from tests.support.runs import (
    Result,
    end,
    environment,
    leased,
    loss_difference,
    plan_file,
    rollouts,
    wait_for,
    weight_difference,
)
from tests.support.tiny import make_model, make_prompts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]
PLAY = f"{Path(__file__).parent / 'plays.py'}:trapped"
CALLS = ("actor_generate", "actor_train", "actor_evaluation")
PARTS = (pytest.param(1, id="whole"), pytest.param(2, id="parts", marks=pytest.mark.all))


@pytest.fixture(scope="module", params=PARTS)
def parameters(request, tmp_path_factory):
    """Two steps of GRPO on plays, with a checkpoint between them; `traps` is a folder that is empty at first.

    Rows are generated in so many parts.
    """
    folder = tmp_path_factory.mktemp("played")
    (folder / "traps").mkdir()
    table = pq.read_table(make_prompts(folder / "words.parquet"))
    table = table.append_column("number", pa.array(range(table.num_rows)))
    table = table.append_column("traps", pa.array([str(folder / "traps")] * table.num_rows))
    pq.write_table(table, folder / "prompts.parquet")
    prompts = {"path": str(folder / "prompts.parquet")}
    calls = dict.fromkeys(CALLS, "0 engine=megatron") | {"actor_generate": f"0 engine=megatron parts={request.param}"}
    plan = plan_file(calls, folder / "plan.json", COMPUTATIONS_OF_GRPO[1:])
    return {
        "prompts": prompts,
        "held_out": prompts | {"split": "held_out"},
        "actor": {"path": make_model(folder / "actor"), "dtype": "float32"},
        "play": {"function": PLAY, "max_tokens": 24, "workers": 1, "deadline_seconds": 600},
        "algo": {
            "batch_size": 4,
            "samples_per_prompt": 2,
            "kl": {"coefficient": 0.0},
            "sampling": {"max_new_tokens": 6},
            "optimizer": {"lr": 1e-2},
        },
        "output_dir": str(folder / "runs"),
        "plan": str(plan),
        "steps": 2,
        "checkpoint_every": 1,
    }


def run(parameters, **changed):
    """What a run made that must complete."""
    with leased(1):
        return Result.of(end(grpo, parameters | changed))


@pytest.fixture(scope="module")
def whole(parameters):
    """A run without a trap."""
    return run(parameters)


@pytest.fixture
def trap(parameters, whole):
    """Set a trap of a kind for a row of the second step; return the file that shows that the row was there.

    The row is in the last group, so in the last part.
    """
    first, second = whole.row_ids
    number = [number for number in second if number not in first][-1]
    file = Path(parameters["prompts"]["path"]).parent / "traps" / str(number)

    def set_trap(kind):
        file.write_text(kind)
        return Path(f"{file}.sprung")

    yield set_trap
    file.unlink(missing_ok=True)
    Path(f"{file}.sprung").unlink(missing_ok=True)


def assert_same(other, whole):
    """Tokens, losses and the trained weights are equal, and there was something to learn."""
    assert other.tokens == whole.tokens
    assert loss_difference(other, whole) == 0
    assert whole.metrics[1]["actor_train.grad_norm"] > 0
    assert weight_difference(other, whole) == 0


def test_a_worker_killed_in_the_middle_of_a_play_changes_no_weight(parameters, whole, trap, tmp_path):
    sprung = trap("dies")
    other = run(parameters, output_dir=str(tmp_path))
    assert sprung.exists()
    assert other.metrics[1]["actor_generate.failed"] == 0
    assert_same(other, whole)


@pytest.mark.all  # test_resume.py kills a run
def test_a_run_killed_in_the_middle_of_a_play_and_resumed_has_the_same_weights(parameters, whole, trap, tmp_path):
    sprung = trap("hangs")
    (tmp_path / "parameters.json").write_text(json.dumps(parameters | {"output_dir": str(tmp_path)}))
    line = [sys.executable, "-m", "tests.flows.stopped_run", "grpo", str(tmp_path / "parameters.json"), "1"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(line, env=environment(), cwd=Path(__file__).parents[2], **output)
    try:
        wait_for(sprung.exists, process)
        wait_for(lambda: list(tmp_path.glob("*/checkpoints/step-000001")), process)  # written behind the second step
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (killed,) = (file.parent for file in tmp_path.glob("*/task_runs.jsonl"))
    assert len(rollouts(killed)) == 1
    assert_same(run(parameters, resume_from=str(killed)), whole)
