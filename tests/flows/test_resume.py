"""Runs that go on from a checkpoint, for real: the same plan gives the same bits, another the same within rounding.

And whatever ends a run in the middle of writing one, the one before is whole and is what the next run starts from.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from prefect.testing.utilities import prefect_test_harness
from safetensors.torch import load_file

from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.options import RunOptions
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.run import prepare
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.mesh import ClusterShape
from tests import plan_matrix
from tests.plan_matrix import ONE, plan

pytestmark = pytest.mark.slow

STEPS, HALF = 4, 2
TOLERANCE = 1e-5
OTHER_PLAN = plan("0-1 dp2 engine=vllm", "1", "0", "0-1 dp2", "0-1 tp2 offload=optimizer", "0-1 pp2 micro_batches=2")
CLUSTER = ClusterShape("desk", num_nodes=1, devices_per_node=2, device_memory_bytes=8 << 30)


@pytest.fixture(scope="module", autouse=True)
def prefect():
    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    """PPO with warm-up, a KL controller that adapts and scores that are normalised: all of it must be carried over."""
    given = plan_matrix.parameters(tmp_path_factory.mktemp("resume"))
    optimizer = given["algo"]["actor_optimizer"] | {"warmup_steps": 6}
    kl = {"kind": "adaptive", "target": 0.5, "horizon": 50.0}
    algo = {"actor_optimizer": optimizer, "kl": kl, "normalise_scores": True}
    return given | {"algo": given["algo"] | algo, "checkpoint_every": HALF}


def run_dir_of(parameters, compact=ONE, num_devices=1, **changes):
    """Run PPO to its end; its folder."""
    name = f"plan{num_devices}"
    file = plan_matrix.plan_file(compact, Path(parameters["output_dir"]).parent / f"{name}.json")
    with plan_matrix.leased(num_devices):
        state = ppo(**ppo.validate_parameters({**parameters, "plan": str(file), **changes}), return_state=True)
    assert state.is_completed(), state.message
    return Path(state.result()["run_dir"])


@pytest.fixture(scope="module")
def whole(parameters):
    """Four steps without a pause."""
    return run_dir_of(parameters, steps=STEPS)


@pytest.fixture(scope="module")
def half(parameters):
    """The first two of them."""
    return run_dir_of(parameters, steps=HALF)


def tokens_by_step(run_dir):
    import pyarrow.parquet as pq

    return {file.stem: pq.read_table(file).column("tokens").to_pylist() for file in (run_dir / "rollouts").iterdir()}


def metrics_of(run_dir):
    """Each step's metrics without those that a clock decides."""
    clocks = ("seconds", "orchestration_share", "fingerprint_share")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in clocks} for line in lines]


def weights_of(run_dir):
    return {role: load_file(run_dir / role / "model.safetensors") for role in ("actor", "critic")}


def test_under_the_same_plan_two_steps_and_two_more_are_four(parameters, whole, half):
    """Tokens, metrics, and the bytes of the trained models; the new folder's metrics are those of all steps."""
    resumed = run_dir_of(parameters, steps=STEPS, resume_from=str(half))
    assert resumed != half
    late = {step: rows for step, rows in tokens_by_step(whole).items() if int(step[-6:]) >= HALF}
    assert late and tokens_by_step(resumed) == late
    assert metrics_of(resumed) == metrics_of(whole)
    for role in ("actor", "critic"):
        one, other = (run_dir / role / "model.safetensors" for run_dir in (whole, resumed))
        assert one.read_bytes() == other.read_bytes()


def test_training_moves_on_after_the_checkpoint(whole, half):
    """Else equality would say nothing."""
    before, after = weights_of(half), weights_of(whole)
    assert all((before[role][name] - after[role][name]).abs().max() > 1e-3 for role in before for name in before[role])
    first, last = metrics_of(half)[0], metrics_of(whole)[STEPS - 1]
    assert first["kl_penalised_rewards.kl_coefficient"] != last["kl_penalised_rewards.kl_coefficient"]


def test_under_another_plan_the_rest_is_the_same_within_rounding(parameters, whole, half):
    """On two ranks where it was one, with other splits for each call."""
    resumed = run_dir_of(parameters, OTHER_PLAN, 2, steps=STEPS, resume_from=str(half))
    late = {step: rows for step, rows in tokens_by_step(whole).items() if int(step[-6:]) >= HALF}
    assert tokens_by_step(resumed) == late
    for role, weights in weights_of(whole).items():
        found = weights_of(resumed)[role]
        assert max(float((values - found[name]).abs().max()) for name, values in weights.items()) < TOLERANCE
    for one, other in zip(metrics_of(whole), metrics_of(resumed), strict=True):
        assert other == pytest.approx(one, abs=1e-4, rel=1e-4)


def command(parameters, folder, **changes):
    """`prefect-rlhf ppo` on two devices, as a process of its own."""
    given = {**parameters, "plan": "flattening", **changes}
    file = folder / "parameters.yaml"
    file.write_text(yaml.safe_dump(given))
    line = [sys.executable, "-m", "prefect_rlhf.flows.cli", "ppo", "--parameters", str(file), "--devices", "2"]
    environment = {key: value for key, value in os.environ.items() if key != "RLHF_LEASE"}
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(find, process, seconds=180):
    """What `find` gives once it gives something; fails when the process ends before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := find():
            return found
        assert process.poll() is None, process.stdout.read()[-2000:]
        time.sleep(0.02)
    raise AssertionError("it never happened")


def ranks_of(process):
    """The processes of the ranks: children of the one that they are forked from, youngest last."""
    found = []
    for child in children(process.pid):
        found += children(child)
    return sorted(found)


def children(pid):
    return [int(c) for task in Path(f"/proc/{pid}/task").glob("*/children") for c in task.read_text().split()]


def block_writing_of(folder, role):
    """A pipe that nobody reads in the place of a shard: whoever opens it to write hangs there."""
    (folder / role).mkdir(parents=True)
    os.mkfifo(folder / role / "shard-00001.safetensors")


@pytest.mark.parametrize("victim", ["rank", "flow"])
def test_a_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before(parameters, tmp_path, monkeypatch, victim):
    """SIGKILL while one rank writes the critic's shard: actor and the other rank's shard are on disk already."""
    monkeypatch.setenv("HOME", str(tmp_path))
    output = tmp_path / "runs"
    options = {"output_dir": str(output), "steps": 30, "checkpoint_every": 1, "keep_checkpoints": 2}
    process = command(parameters, tmp_path, **options)
    try:
        first = wait_for(lambda: sorted(output.glob("*/checkpoints/step-000001/checkpoint.json")), process)[0].parent
        part = first.with_name("step-000004.part")
        block_writing_of(part, "critic")
        other_shard = part / "critic" / "shard-00000.json"
        wait_for(lambda: other_shard.exists() and (part / "actor" / "shard-00001.json").exists(), process)
        target = ranks_of(process)[-1] if victim == "rank" else process.pid
        os.kill(target, signal.SIGKILL)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode != 0
    if victim == "rank":
        assert "was killed by SIGKILL" in said
    left = sorted(path.name for path in first.parent.iterdir())
    assert left == ["step-000002", "step-000003", "step-000004.part"]
    resumed = run_dir_of({**parameters, **options}, steps=5, resume_from="latest")
    assert [line["step"] for line in metrics_of(resumed)] == [0, 1, 2, 3, 4, 5]
    assert (resumed / "checkpoints" / "step-000005").is_dir()


def prepared(parameters, flow=ppo, **changes):
    """What a run decides before it uses a device."""
    values = flow.validate_parameters({**parameters, **changes})
    options = RunOptions(**{key: values.pop(key) for key in RunOptions.model_fields if key in values})
    lease = Lease("pool", "abc", CLUSTER, CLUSTER.whole, CLUSTER.whole.devices())
    return prepare(flow.algorithm, values, options, lease)


def deeper(parameters, folder):
    from tests.tiny import make_model

    return {"path": make_model(folder / "deeper", layers=6, hidden=128, heads=4), "dtype": "float32"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p, f: {"seed": 2}, r"resume_from: got 'a checkpoint with seed 1', expected 2, as in this run"),
        (lambda p, f: {"steps": HALF}, r"steps: got 2, expected more than 2, the steps that step-000002 has finished"),
        (lambda p, f: {"resume_from": "/nowhere"}, r"resume_from: got '/nowhere', expected the folder of a run or"),
        (lambda p, f: {"resume_from": str(f)}, r"expected a folder with a finished checkpoint"),
        (lambda p, f: {"resume_from": "latest", "output_dir": str(f)}, r"expected a run in .* that finished a check"),
        (lambda p, f: {"actor": deeper(p, f)}, r"models\.actor\.shape\.num_layers 4', expected 6, as in this run"),
        (
            lambda p, f: {"algo": p["algo"] | {"actor_optimizer": {"lr": 1e-3}}},
            r"models\.actor\.optimizer\.lr 0\.01', expected 0\.001, as in this run",
        ),
        (lambda p, f: {"algo": p["algo"] | {"gamma": 0.5}}, r"calls\.gae\.operation\.settings\.gamma 1\.0', exp"),
    ],
)
def test_what_is_not_this_run_is_refused_in_one_line(parameters, half, tmp_path, change, says):
    changes = {"steps": STEPS, "resume_from": str(half), "plan": "flattening"} | change(parameters, tmp_path)
    with pytest.raises(InvalidInput, match=says) as error:
        prepared(parameters, **changes)
    assert "\n" not in str(error.value)


def test_another_algorithm_is_refused(parameters, half):
    common = {key: parameters[key] for key in ("prompts", "actor", "ref", "reward", "output_dir")}
    with pytest.raises(InvalidInput, match=r"a checkpoint with algorithm 'ppo'', expected 'grpo'|algorithm 'ppo'"):
        prepared(common, grpo, steps=STEPS, resume_from=str(half))


def test_a_moved_model_is_no_other_model(parameters, half, tmp_path):
    """A frozen role is read from wherever this run says."""
    moved = shutil.copytree(parameters["ref"]["path"], tmp_path / "moved")
    changes = {"ref": parameters["ref"] | {"path": str(moved)}, "resume_from": str(half), "plan": "flattening"}
    ready = prepared(parameters, steps=STEPS, **changes)
    assert (ready.augmented.first_step, ready.checkpoint.step) == (HALF, HALF)


def test_a_corrupt_shard_ends_the_run_before_anything_is_built(parameters, half, tmp_path):
    """One flipped bit: one line with file, role and parameter; the checkpoint before it in the same folder is whole."""
    copy = shutil.copytree(half, tmp_path / "copy")
    shard = copy / "checkpoints" / "step-000002" / "critic" / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    with plan_matrix.leased(1):
        given = {**parameters, "plan": "flattening", "steps": STEPS, "resume_from": str(copy)}
        state = ppo(**ppo.validate_parameters(given), return_state=True)
    assert state.is_failed() and "\n" not in state.message
    assert "checkpoint.critic" in state.message and shard.name in state.message and "exp_avg" in state.message
    run_dirs = [path for path in Path(parameters["output_dir"]).iterdir() if not path.is_symlink()]
    newest = max(run_dirs, key=lambda path: path.stat().st_mtime)
    assert not (newest / "task_runs.jsonl").exists(), "nothing ran"


def test_what_is_stored_is_float32_under_hugging_face_names(half):
    stored = load_file(half / "checkpoints" / "step-000002" / "actor" / "shard-00000.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert "exp_avg_sq model.norm.weight [0:128]" in stored
    manifest = json.loads((half / "checkpoints" / "step-000002" / "checkpoint.json").read_text())["manifest"]
    assert manifest["states"]["kl_penalised_rewards"]["type"] == "prefect_rlhf.tasks.rewards:RewardState"
