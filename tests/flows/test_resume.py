"""Runs that are killed and go on: the same plan gives the same bits, another the same within rounding.

PPO with warm-up and a rate that falls, a KL controller that adapts and scores that are normalised: all of it must be
carried over. The killed run is a process of its own with two ranks, all of which get SIGKILL at a moment that the test
chooses.
"""

import errno
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import Pause
from prefect.flow_engine import run_flow
from prefect.states import Paused, Pending
from safetensors.torch import load_file, save_file

from prefect_rlhf.engines.files import checkpoint_files
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.run_folder import earlier_folder, new_folder
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.reporting.run_record import RunRecord, read_parameters
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import read_spans
from prefect_rlhf.tasks.running.stop_request import STOP_POLL_SECONDS, StopRequest
from tests.flows.stopped_run import descendants, killed_run
from tests.support import plan_matrix
from tests.support.cases import first
from tests.support.finished_steps import write_checkpoint
from tests.support.plan_matrix import ALONE, SEED, plan
from tests.support.runs import end, folder_of, leased, plan_file, prepared, read_lines, rollouts
from tests.support.runs import whole as whole_lease
from tests.support.tiny import make_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

STEPS, HALF = 4, 2
TOLERANCE = 1e-5
PLANS = {
    "one": ALONE,
    "replicas": plan(
        "0-1 tp2 engine=megatron", "0", "1", "0-1 dp2", "0-1 dp2 offload=optimizer", "0-1 dp2 micro_batches=2"
    ),
    "split": plan("0-1 tp2 engine=vllm", "1", "0", "0-1 dp2", "0-1 tp2", "0-1 pp2 micro_batches=2"),
    "separated": plan("0 engine=vllm", "0", "0", "0", "1", "1"),
    "streamed": plan("0 engine=megatron parts=4", "1 parts=2", "1 parts=4", "1 parts=8", "0-1 dp2", "0-1 dp2"),
}
TWO_DEVICES = whole_lease(ClusterShape("desk", num_nodes=1, devices_per_node=2, device_memory_bytes=8 << 30))


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    given = plan_matrix.parameters(tmp_path_factory.mktemp("resume"))
    falls = {"warmup_steps": 2, "schedule": "cosine", "decay_steps": 14}
    algo = given["algo"] | {
        "actor_optimizer": given["algo"]["actor_optimizer"] | falls,
        "kl": {"kind": "adaptive", "target": 0.5, "horizon": 50.0},
        "normalise_scores": True,
    }
    return given | {"algo": algo, "checkpoint_every": HALF, "steps": STEPS}


def planned(parameters, name):
    """Parameters with the file of a plan."""
    return {**parameters, "plan": str(plan_file(PLANS[name], Path(parameters["output_dir"]).parent / f"{name}.json"))}


def run(parameters, plan, num_devices=2, **changes):
    """The state in which PPO ends, run in this process."""
    with leased(num_devices):
        return end(ppo, planned(parameters, plan) | changes)


def run_dir_of(parameters, plan, **changes):
    """The folder of a run to its end."""
    return folder_of(run(parameters, plan, **changes))


def killed(parameters, plan, folder, node, file, reached, victims="all", **changes):
    """The folder of a run that was killed with `file` not written, when `reached(its folder)`; and what it said."""
    return killed_run("ppo", planned(parameters, plan) | changes, 2, folder, node, file, reached, victims)


def all_but_one_shard(run_dir):
    """The actor's shards are on disk, and the critic's but for one; behind it the next step has rewards."""
    part = run_dir / "checkpoints" / "step-000003.part"
    written = [(part / name).exists() for name in ("actor.trunk/shard-00001.json", "critic.trunk/shard-00000.json")]
    return all(written) and '"node": "gae@4"' in (run_dir / "task_runs.jsonl").read_text()


SHARD = "checkpoints/step-000003.part/critic.trunk/shard-00001.safetensors"


@pytest.fixture(scope="module")
def whole(parameters):
    """Four steps without a pause."""
    return run_dir_of(parameters, "replicas")


@pytest.fixture(scope="module")
def half(parameters, tmp_path_factory):
    """A run whose processes were all killed in the fourth step, the checkpoint after the third being written behind."""
    folder = tmp_path_factory.mktemp("killed")
    return killed(parameters, "replicas", folder, "commit@3", SHARD, all_but_one_shard, checkpoint_every=1)[0]


def metrics_of(run_dir):
    """Each step's metrics without those that a clock decides."""
    clocks = ("seconds", "orchestration_share", "fingerprint_share")
    lines = read_lines(run_dir / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name not in clocks} for line in lines]


def assert_same_bits(resumed, whole):
    """Tokens and metrics of all steps, and the bytes of the trained models."""
    assert len(rollouts(whole)) == STEPS
    assert rollouts(resumed) == rollouts(whole)
    assert metrics_of(resumed) == metrics_of(whole)
    for role in ("actor", "critic"):
        one, other = (run_dir / role / "model.safetensors" for run_dir in (whole, resumed))
        assert one.read_bytes() == other.read_bytes()


def test_killed_in_the_middle_of_a_checkpoint_and_resumed_it_is_the_whole_run(parameters, whole, half):
    """Bit for bit, from the checkpoint before, in a folder of its own."""
    found = sorted(path.name for path in (half / "checkpoints").iterdir())
    assert found == ["step-000001", "step-000002", "step-000003.part"]
    resumed = run_dir_of(parameters, "replicas", resume_from=str(half))
    assert resumed != half
    assert_same_bits(resumed, whole)
    checkpoint = half / "checkpoints" / "step-000002"
    assert read_parameters(resumed) == read_parameters(whole) | {"resume_from": str(checkpoint)} | {
        "output_dir": str(resumed.parent)
    }
    told = (resumed / "parameters.yaml").read_text()
    assert f"# continues {half}\n" in told and f"#   resume_from: None became '{checkpoint}'" in told
    assert sorted(path.name for path in (resumed / "checkpoints").iterdir()) == ["step-000004"]


@pytest.fixture
def at_node(monkeypatch):
    """Let something happen once, as a node of a run in this process begins; it gets the dispatcher."""
    execute, waiting = Dispatcher.execute, {}

    def harmed(self, node):
        if node.id in waiting:
            waiting.pop(node.id)(self)
        return execute(self, node)

    monkeypatch.setattr(Dispatcher, "execute", harmed)
    return waiting.__setitem__


def kill_a_rank(dispatcher):
    os.kill(descendants(os.getpid())[-1], signal.SIGKILL)


@pytest.mark.all  # tests/blocks/test_worker.py starts a smaller run again
def test_a_run_with_retries_recovers_from_a_lost_rank_in_its_folder(parameters, whole, at_node, monkeypatch, tmp_path):
    """The same flow run, bit for bit; what it had of the steps that it does again is there once."""
    at_node("critic_train@4", kill_a_rank)
    monkeypatch.setattr(ppo, "retries", 1)
    retried = run_dir_of(parameters, "replicas", output_dir=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"latest", retried.name}
    assert_same_bits(retried, whole)
    assert {span.step for span in read_spans(retried)} == set(range(STEPS + 1))
    assert len({span.node for span in read_spans(retried)}) == len(read_spans(retried))


@pytest.mark.all
def test_a_run_that_loses_a_rank_in_the_middle_of_its_parts_is_the_whole_run(
    parameters, whole, at_node, monkeypatch, tmp_path
):
    """Two parts of the responses exist, and a part of the scores; the step begins again, with all parts."""
    begun = []
    at_node("actor_generate.3of4@4", lambda dispatcher: (begun.append(3), kill_a_rank(dispatcher)))
    monkeypatch.setattr(ppo, "retries", 1)
    retried = run_dir_of(parameters, "streamed", output_dir=str(tmp_path))
    assert begun == [3]
    assert {path.name for path in tmp_path.iterdir()} == {"latest", retried.name}
    assert rollouts(retried) == rollouts(whole)
    nodes = [span.node for span in read_spans(retried)]
    assert len(set(nodes)) == len(nodes)
    assert {f"actor_generate.{part}of4@4" for part in (1, 2, 3, 4)} <= set(nodes)
    for role in ("actor", "critic"):
        one, other = (load_file(run_dir / role / "model.safetensors") for run_dir in (whole, retried))
        assert max(float((values - other[name]).abs().max()) for name, values in one.items()) < TOLERANCE


def kill_behind_the_last_checkpoint(dispatcher):
    """Wait until the last step's checkpoint is complete, then kill a rank."""
    last = dispatcher.run.run_dir / "checkpoints" / f"step-{STEPS:06d}"
    ends = time.monotonic() + 60
    while not last.is_dir() and time.monotonic() < ends:
        time.sleep(0.05)
    assert last.is_dir()
    kill_a_rank(dispatcher)


@pytest.mark.all
@pytest.mark.parametrize("harm", [kill_a_rank, kill_behind_the_last_checkpoint])
def test_a_run_that_loses_a_rank_after_its_last_step_has_its_end_to_do_again(
    parameters, whole, at_node, monkeypatch, tmp_path, harm
):
    at_node(f"export.actor@{STEPS}", harm)
    monkeypatch.setattr(ppo, "retries", 1)
    retried = run_dir_of(parameters, "replicas", output_dir=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"latest", retried.name}
    assert read_parameters(retried)["resume_from"] is None
    assert (retried / "parameters.yaml").read_text().count("# began again on 20") == 1
    assert RunRecord.read(retried).state == "completed"
    assert_same_bits(retried, whole)


@pytest.mark.all  # as `benchmarks/faults/chaos.py` does with a worker, of which `make test` has a part
def test_a_suspended_run_ends_its_step_and_goes_on_when_it_is_resumed(parameters, whole, at_node, tmp_path):
    """With a checkpoint in the middle of a period; no process is left meanwhile. What the button Suspend does."""
    context = []

    def suspend(dispatcher):
        context[0].flow_run_suspension_request.mark_requested(Paused(name="Suspended"))
        time.sleep(2 * STOP_POLL_SECONDS)  # a tiny model would be at the end before anyone looks

    def note(*_):
        context.append(FlowRunContext.get())

    at_node("ref_inference@3", suspend)
    before = descendants(os.getpid())  # the server
    given = ppo.validate_parameters(planned(parameters, "replicas") | {"output_dir": str(tmp_path)})
    with leased(2):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Pause):
            begin = StopRequest.__init__
            patch.setattr(StopRequest, "__init__", lambda self: (note(), begin(self))[1])
            ppo(**given)
        flow_run = context[0].flow_run
        folder = tmp_path / flow_run.name
        assert "step-000003" in {path.name for path in (folder / "checkpoints").iterdir()}
        assert RunRecord.read(folder).state == "stopped"
        assert len(rollouts(folder)) == 3 and descendants(os.getpid()) == before
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(flow_run.id, Pending(), force=True)
            resumed = run_flow(ppo, flow_run=client.read_flow_run(flow_run.id), parameters=given, return_type="state")
    assert resumed.is_completed(), resumed.message
    assert_same_bits(folder, whole)


def test_training_moves_on_after_the_checkpoint(parameters, whole, half):
    """Else equality would say nothing."""
    first, *_, last = metrics_of(whole)[:STEPS]
    assert first["kl_penalised_rewards.kl_coefficient"] != last["kl_penalised_rewards.kl_coefficient"]
    shards = (half / "checkpoints" / "step-000002" / "actor.trunk").glob("*.safetensors")
    stored = {key: values for shard in shards for key, values in load_file(shard).items()}
    final = load_file(whole / "actor" / "model.safetensors")["model.norm.weight"]
    assert (stored["main model.norm.weight [0:128]"] - final).abs().max() > 1e-3


@pytest.mark.parametrize(("plan", "num_devices"), first(1, [("one", 1), ("split", 2), ("streamed", 2)]))
def test_under_another_plan_the_rest_is_the_same_within_rounding(parameters, whole, half, plan, num_devices):
    """The optimizer was sharded over two replicas; now it is whole, or split by tensors and by layers."""
    resumed = run_dir_of(parameters, plan, num_devices=num_devices, resume_from=str(half))
    assert rollouts(resumed) == rollouts(whole)
    for role in ("actor", "critic"):
        one, other = (load_file(run_dir / role / "model.safetensors") for run_dir in (whole, resumed))
        assert max(float((values - other[name]).abs().max()) for name, values in one.items()) < TOLERANCE
    for one, other in zip(metrics_of(whole), metrics_of(resumed), strict=True):
        for name in [name for name in one if name.endswith("clip_fraction")]:
            assert abs(one.pop(name) - other.pop(name)) < 0.02, "one token of some hundred is at the limit"
        assert other == pytest.approx(one, abs=1e-4, rel=1e-4)


@pytest.mark.all
def test_killed_in_the_middle_of_a_step_with_stale_generation_it_is_the_whole_run(parameters, tmp_path):
    """Step 4 was generated with the weights of step 2 while step 3 trained; the policy of step 4 is half made."""

    def trained(run_dir):
        return '"node": "gae@4"' in (run_dir / "task_runs.jsonl").read_text()

    stale = {"staleness": 1}
    whole = run_dir_of(parameters, "separated", **stale)
    versions = [rows[0] for rows in rollouts(whole, "weight_version")]
    assert versions == [0, 0, 2, 2], "right after a checkpoint generation reads the newest weights"
    half, _ = killed(
        parameters, "separated", tmp_path, "record_rollouts@4", "rollouts/step-000004.partial", trained, **stale
    )
    assert_same_bits(run_dir_of(parameters, "separated", resume_from=str(half), **stale), whole)


@pytest.mark.all
def test_a_killed_rank_ends_the_run_with_a_message_and_no_unfinished_files(parameters, tmp_path):
    run_dir, said = killed(
        parameters, "replicas", tmp_path, "commit@3", SHARD, all_but_one_shard, "last rank", checkpoint_every=1
    )
    assert "was killed by SIGKILL in" in said  # what was running beside may tell it first
    assert (
        f"step-000002 is complete; to resume from it, set resume_from={run_dir / 'checkpoints' / 'step-000002'}" in said
    )
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000001", "step-000002"]


@pytest.mark.all  # `test_full_disk` ends at every file
def test_a_full_disk_leaves_the_checkpoint_before_and_says_so(parameters, monkeypatch, caplog):
    """One line that names the file; what was written of the new one is removed."""
    write = checkpoint_files.write_tensors

    def write_until_full(file, *arguments):
        if "step-000002" not in str(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, *arguments)

    monkeypatch.setattr(checkpoint_files, "write_tensors", write_until_full)
    output = Path(parameters["output_dir"]).parent / "full"
    state = run(parameters, "one", num_devices=1, output_dir=str(output))
    assert re.fullmatch(
        r"OutputFailed: rank 0: .*step-000004\.part/actor\.trunk/shard-00000\.safetensors cannot be written: No.*",
        state.message,
    )
    (checkpoints,) = output.glob("*/checkpoints")
    assert [path.name for path in checkpoints.iterdir()] == ["step-000002"]
    assert f"step-000002 is complete; to resume from it, set resume_from={checkpoints / 'step-000002'}" in caplog.text
    resumed = decided(parameters, resume_from="latest", output_dir=str(output))
    assert resumed.request.checkpoint.folder == checkpoints / "step-000002"


def decided(parameters, flow=ppo, **changes):
    """What a run decides before it uses a device."""
    return prepared(flow, {**parameters, **changes}, TWO_DEVICES)


@pytest.fixture(scope="module")
def stored(parameters, tmp_path_factory):
    """The folder of a run with a checkpoint after two steps, as far as `prepare` looks at it."""
    run_dir, whole = tmp_path_factory.mktemp("stored") / "run", decided(parameters, plan="flattening")
    write_checkpoint(whole.augmented, run_dir, HALF, every=HALF, seed=SEED, lineage=whole.request.lineage)
    return run_dir


def deeper(folder):
    return {"path": make_model(folder / "deeper", layers=6, hidden=128, heads=4), "dtype": "float32"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda p, f: {"seed": 9}, rf"resume_from: got 'a checkpoint with seed {SEED}', expected 9, as in this run"),
        (lambda p, f: {"steps": 1}, r"steps: got 1, expected at least 2, the steps that step-000002 has finished"),
        (lambda p, f: {"staleness": 1}, r"^staleness: got 1, expected 0, as in the checkpoint step-000002$"),
        (lambda p, f: {"actor": deeper(f)}, r"models\.actor\.shape\.num_layers 4', expected 6, as in this run"),
        (
            lambda p, f: {"algo": p["algo"] | {"actor_optimizer": p["algo"]["actor_optimizer"] | {"lr": 1e-3}}},
            r"^algo\.actor_optimizer\.lr: got 0\.001, expected 0\.002, as in the checkpoint step-000002; "
            r"to change it from here on, add -p resume_changes=algo\.actor_optimizer\.lr$",
        ),
        (lambda p, f: {"algo": p["algo"] | {"gamma": 0.5}}, r"^algo\.gamma: got 0\.5, expected 1\.0, as in the check"),
        (
            lambda p, f: {"algo": p["algo"] | {"batch_size": 8}},
            r"^algo\.batch_size: got 8, expected 16, as in the [^;]*$",
        ),
        (
            lambda p, f: {"prompts": p["prompts"] | {"max_prompt_length": 9}},
            r"^prompts\.max_prompt_length: got 9, expect",
        ),
        (
            lambda p, f: {
                "prompts": p["prompts"] | {"max_prompt_length": 9},
                "resume_changes": "prompts.max_prompt_length",
            },
            r"^resume_changes: got 'prompts\.max_prompt_length', expected a parameter that changes no rows",
        ),
        (
            lambda p, f: {"actor": p["actor"] | {"dtype": "bfloat16"}},
            r"^actor\.dtype: got 'bfloat16', expected 'float32', as",
        ),
        (
            lambda p, f: {"resume_changes": ["algo.gamma"]},
            r"^resume_changes: 'algo\.gamma' is not used: algo\.gamma is 1",
        ),
    ],
)
def test_another_runs_checkpoint_is_refused_in_one_line(parameters, stored, tmp_path, change, says):
    changes = {"resume_from": str(stored), "plan": "flattening"} | change(parameters, tmp_path)
    with pytest.raises(InvalidInput, match=says) as error:
        decided(parameters, **changes)
    assert "\n" not in str(error.value)


def test_another_algorithm_is_refused(parameters, stored):
    common = {key: parameters[key] for key in ("prompts", "held_out", "actor", "ref", "reward", "output_dir")}
    with pytest.raises(InvalidInput, match=r"a checkpoint with algorithm 'ppo'\", expected 'grpo', as in this run"):
        decided(common, grpo, steps=STEPS, resume_from=str(stored))


def test_a_moved_frozen_model_counts_as_the_same(parameters, stored, tmp_path):
    """A frozen role is read from wherever this run says."""
    moved = shutil.copytree(parameters["ref"]["path"], tmp_path / "moved")
    changes = {"ref": parameters["ref"] | {"path": str(moved)}, "resume_from": str(stored), "plan": "flattening"}
    ready = decided(parameters, **changes)
    assert (ready.augmented.finished, ready.request.checkpoint.step) == (HALF, HALF)


def test_another_frozen_model_is_refused_before_a_device_is_used(parameters, half, tmp_path):
    """By a matrix of its first layer or of its last; the same weights in another folder and file are no other model."""
    changes = {"resume_from": str(half), "plan": "flattening"}
    for name, changed in (("first", "model.layers.0."), ("last", "model.layers.3."), ("same", "none")):
        folder = shutil.copytree(parameters["ref"]["path"], tmp_path / name)
        weights = load_file(folder / "model.safetensors")
        weights |= {key: value + 1e-3 for key, value in weights.items() if key.startswith(changed)}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        ref = {"ref": parameters["ref"] | {"path": str(folder)}}
        if name == "same":
            assert decided(parameters, **changes, **ref).request.checkpoint.step == HALF
        else:
            with pytest.raises(InvalidInput, match=r"other weights of ref', expected the weights in "):
                decided(parameters, **changes, **ref)


def ends_before_any_task_run(parameters, folder, **changes):
    """The message of a run that ended while its models were built."""
    state = run(parameters, "one", num_devices=1, output_dir=str(folder), **changes)
    assert state.is_failed() and "\n" not in state.message
    assert not list(folder.glob("*/task_runs.jsonl"))
    return state.message


def test_a_single_other_weight_of_a_frozen_model_is_refused_when_it_is_built(parameters, half, tmp_path):
    """Only the fingerprint of the whole tells."""
    other = shutil.copytree(parameters["reward"]["path"], tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["score.weight"][0, 5] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    changes = {"reward": parameters["reward"] | {"path": str(other)}, "resume_from": str(half)}
    said = ends_before_any_task_run(parameters, tmp_path / "runs", **changes)
    assert "resume_from: got 'a checkpoint of a run with other weights of reward', expected the weights in" in said


def test_a_corrupt_shard_ends_the_run_before_anything_is_built(parameters, half, tmp_path, caplog):
    """One flipped bit: one line with file, weights and parameter, and nobody recommends that checkpoint."""
    copy = shutil.copytree(half, tmp_path / "copy", ignore=shutil.ignore_patterns("*.part"))
    shard = copy / "checkpoints" / "step-000002" / "critic.trunk" / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    said = ends_before_any_task_run(parameters, tmp_path / "runs", resume_from=str(copy))
    assert re.search(rf"checkpoint\.critic\.trunk: got 'other content of exp_avg.* in .*{shard.name}'", said)
    assert "is complete; to resume from it" not in caplog.text


def test_checkpoints_store_float32_under_hugging_face_names(half):
    stored = load_file(half / "checkpoints" / "step-000002" / "actor.trunk" / "shard-00000.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    assert {key.split()[0] for key in stored} == {"main", "exp_avg", "exp_avg_sq"}
    manifest = json.loads((half / "checkpoints" / "step-000002" / "checkpoint.json").read_text())["manifest"]
    assert manifest["states"]["kl_penalised_rewards"]["type"] == "RewardState"
    trunks, heads = {f"{role}.trunk" for role in ("actor", "critic", "ref", "reward")}, ("critic", "reward")
    assert manifest["fingerprints"].keys() == trunks | {f"{role}.scalar_head" for role in heads}


def test_a_flow_run_finds_its_own_folder_even_among_equal_names(tmp_path):
    names = [new_folder(tmp_path, "amber-fox", flow_run_id).name for flow_run_id in "abc"]
    assert names == ["amber-fox", "amber-fox-2", "amber-fox-3"]
    assert earlier_folder(tmp_path, "amber-fox", "b") == tmp_path / "amber-fox-2"
    assert earlier_folder(tmp_path, "amber-fox", "d") is None
