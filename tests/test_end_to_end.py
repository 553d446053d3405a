"""A user's path: server, worker, deployments, Megatron-core, vLLM, two ranks; in `make test-all` with a real model."""

import asyncio
import contextlib
import json
import re
import socket
import time
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.filters import ArtifactFilter, FlowRunFilter, LogFilter
from prefect.client.schemas.sorting import LogSort

from benchmarks.demo.__main__ import run_folders
from benchmarks.demo.outcome import read_metrics
from benchmarks.demo.pretrained import prepare_model
from benchmarks.demo.ratings import prepare_ratings
from benchmarks.demo.server import DemoServer
from prefect_rlhf.blocks.lease_book import Holder, LeaseBook, LeasedMesh
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.running.steps.learning import MOST_CHANGE
from tests.support.migrated_database import put_database
from tests.support.plan_matrix import plan
from tests.support.runs import plan_file, read_lines, rollouts
from tests.support.tiny import make_model, make_pairs, make_prompts

PROJECT = Path(__file__).parents[1]
CACHE = PROJECT / ".rlhf"  # model and data come out of packages once, as in the demo
STEPS = 2

OVERLAP = plan(
    "0-1 dp2 engine=vllm", "0 offload=all", "1", "0-1 dp2", "0-1 dp2 micro_batches=2", "0-1 dp2 micro_batches=2"
)


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.all)])
def server(request, tmp_path_factory):
    """The demo's server and worker, with a tiny model and a few made-up rows or with the model and rows of the demo."""
    home = tmp_path_factory.mktemp("home")
    (home / "data").mkdir()
    if request.param == "tiny":
        make_model(home / "models" / "smollm2")
        make_model(home / "models" / "reward", scalar=True)
        make_prompts(home / "data" / "prompts.parquet", num_train=64, num_held_out=8)
        make_pairs(home / "data" / "preferences.parquet", num_train=64)
    else:
        prepare_model("smollm2", CACHE / "models" / "smollm2", CACHE / "downloads")
        prepare_ratings(CACHE / "data", CACHE / "downloads")
        (home / "models").symlink_to(CACHE / "models")
        for name, held_out in (("prompts", 8), ("preferences", 4)):
            write_few(CACHE / "data" / f"{name}.parquet", home / "data" / f"{name}.parquet", held_out)
    plan_file(OVERLAP, home / "overlap.json")
    put_database(home / "prefect")
    started = DemoServer(home, PROJECT, free_port())
    try:
        started.start()
        yield started
    finally:
        started.stop()


def write_few(source, target, held_out):
    """The same columns, few rows: what is held out is evaluated as a whole."""
    table = pq.read_table(source)
    splits = table.column("split").to_pylist()
    keep = [i for i, split in enumerate(splits) if split == "train"][:64]
    keep += [i for i, split in enumerate(splits) if split == "held_out"][:held_out]
    pq.write_table(table.take(keep), target)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run(server, deployment, **parameters):
    """`prefect deployment run`, to its end; returns the run's folder."""
    flags = [flag for name, value in parameters.items() for flag in ("-p", f"{name}={json.dumps(value)}")]
    server.prefect("deployment", "run", f"rlhf/{deployment}", "--watch", *flags, limit_seconds=500)
    return (server.home / "runs" / deployment / "latest").resolve()


@pytest.fixture(scope="module")
def reward_run(server):
    algo = {"batch_size": 4, "evaluate_every": 2}
    return run(server, "reward", steps=1, algo=algo)


@pytest.fixture(scope="module")
def ppo_run(server, request):
    """With the tiny reward model, or with the model that `reward_run` trains."""
    made = server.home / "models" / "reward"
    path = made if made.exists() else request.getfixturevalue("reward_run") / "reward"
    scalar = {"path": str(path), "head": "scalar"}
    algo = {"batch_size": 8, "evaluate_every": 2, "sampling": {"max_new_tokens": 8}}
    given = {"algo": algo, "reward": scalar, "critic": scalar, "plan": str(server.home / "overlap.json")}
    return run(server, "ppo", steps=STEPS, **given)


@pytest.fixture(scope="module")
def records(server, ppo_run):
    """What the server kept of the PPO run: task runs, their logs, artifacts."""

    async def read():
        async with PrefectClient(f"{server.ui_url}/api") as client:
            (flow_run,) = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"any_": [ppo_run.name]}))
            groups = await client.read_flow_runs(flow_run_filter=FlowRunFilter(name={"like_": "step"}))
            ids = [group.id for group in groups if group.start_time >= flow_run.start_time]
            task_runs = await client.read_task_runs(flow_run_filter=FlowRunFilter(id={"any_": ids}))
            logs = await client.read_logs(LogFilter(flow_run_id={"any_": ids}), limit=200, sort=LogSort.TIMESTAMP_ASC)
            artifacts = await client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id={"any_": [flow_run.id]}))
            return flow_run, task_runs, logs, artifacts

    return asyncio.run(read())


@pytest.mark.slow
@pytest.mark.all  # tests/flows/test_offline_runs.py trains a reward model without a worker
def test_a_reward_model_is_trained_and_exported_with_its_scalar_head(reward_run):
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(reward_run / "reward")
    assert model.score.weight.shape == (1, model.config.hidden_size)
    assert model.score.weight.abs().max() > 0, "the head starts at zero, so a step of training must have moved it"


@pytest.mark.slow
def test_every_node_of_the_graph_is_one_task_run_with_a_name_that_says_what_it_is(ppo_run, records):
    """The graph that was planned is the graph that ran."""
    _, task_runs, _, _ = records
    assert sorted(run.name for run in task_runs) == sorted(
        span["title"] for span in read_lines(ppo_run / "task_runs.jsonl")
    )
    names = [run.name for run in task_runs]
    assert "actor.generate · step 2 · n0:0-1 dp2 · v1" in names
    assert "actor.train_step · step 2 · n0:0-1 dp2 · v1 → v2" in names
    assert any(name.startswith("actor.reallocate · step 2") for name in names)
    assert any("reload" in name for name in names)
    assert any("transfer" in name for name in names)
    assert all(run.state.is_completed() for run in task_runs)


@pytest.mark.slow
def test_reference_and_reward_run_at_the_same_time_on_disjoint_devices(records):
    """Shown from the task runs that the server recorded."""
    _, task_runs, _, _ = records

    def interval(start):
        (found,) = [run for run in task_runs if run.name.startswith(start)]
        return found.start_time, found.end_time

    overlaps = []
    for step in range(1, STEPS + 1):
        (a, b), (c, d) = interval(f"ref.inference · step {step}"), interval(f"reward.inference · step {step}")
        overlaps.append(min(b, d) - max(a, c))
    assert max(overlaps) > timedelta(0)


@pytest.mark.slow
def test_each_task_run_records_pool_lease_and_devices(ppo_run, records):
    _, task_runs, logs, _ = records
    told = {log.task_run_id for log in logs if "lease" in log.message and "devices n0:" in log.message}
    assert told >= {run.id for run in task_runs}
    assert {span["pool"] for span in read_lines(ppo_run / "task_runs.jsonl")} == {"two-device-mesh"}


@pytest.mark.slow
def test_plan_progress_metrics_and_timeline_are_artifacts(records):
    flow_run, _, _, artifacts = records
    by_key = {artifact.key: artifact for artifact in artifacts}
    assert set(by_key) >= {"plan", "progress", "metrics", "curves", "timeline", "memory"}
    assert by_key["progress"].data == 100.0
    assert all("data:image/svg+xml;base64," in by_key[key].data for key in ("timeline", "curves"))
    assert flow_run.state.is_completed()


@pytest.mark.slow
def test_rollouts_say_what_was_generated_by_which_weights(ppo_run):
    assert [rows[0] for rows in rollouts(ppo_run, "weight_version")] == [0, 1]
    row = pq.read_table(max((ppo_run / "rollouts").glob("*.parquet"))).to_pylist()[0]
    assert len(row["logprobs"]) == len(row["advantages"]) <= 8
    assert row["step"] == STEPS and row["prompt"] and isinstance(row["reward"], float)


@pytest.mark.slow
def test_both_engines_agree_on_the_logprobs_of_the_sampled_tokens(ppo_run):
    """In bfloat16 the two differ by rounding; were weights stale or positions shifted, it would be nats."""
    steps = [step for step in read_metrics(ppo_run) if "actor_train.loss" in step]
    assert len(steps) == STEPS
    assert all(step["actor_train.initial_change"] < MOST_CHANGE for step in steps)


@pytest.mark.slow
def test_the_policy_that_was_trained_loads_in_plain_transformers(server, ppo_run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(ppo_run / "actor")
    before = AutoModelForCausalLM.from_pretrained(server.home / "models" / "smollm2", dtype=model.dtype)
    changed = [not a.equal(b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert any(changed)
    assert AutoTokenizer.from_pretrained(ppo_run / "actor").decode([5]) is not None


@pytest.mark.slow
@pytest.mark.all
def test_a_dry_run_takes_no_device_and_leaves_no_files(server, reward_run):
    before = set((server.home / "runs").glob("ppo/*"))
    server.prefect("deployment", "run", "rlhf/ppo", "--watch", "-p", "dry_run=true", limit_seconds=120)
    assert set((server.home / "runs").glob("ppo/*")) == before


@pytest.mark.slow
@pytest.mark.all  # tests/blocks/test_worker.py cancels a smaller run
def test_cancelling_ends_every_process_of_the_run_and_frees_its_devices(server, reward_run):
    """While ranks compute."""
    algo = json.dumps({"batch_size": 8, "evaluate_every": 2, "sampling": {"max_new_tokens": 8}})
    before = run_folders(server.home / "runs" / "ppo")
    said = server.prefect("deployment", "run", "rlhf/ppo", "-p", "steps=50", "-p", f"algo={algo}")
    run_id = re.search(r"UUID: ([0-9a-f-]{36})", said).group(1)
    folder = server.home / "runs" / "ppo"
    began = wait_until(
        lambda: any((folder / new / "metrics.jsonl").exists() for new in run_folders(folder) - before), 240
    )
    assert began, "no step ended"
    assert len(processes_of(run_id)) >= 3, "the flow and its two ranks"
    server.prefect("flow-run", "cancel", run_id)
    assert wait_until(lambda: not processes_of(run_id), 30)

    async def state():
        async with PrefectClient(f"{server.ui_url}/api") as client:
            return (await client.read_flow_run(run_id)).state

    assert wait_until(lambda: asyncio.run(state()).is_cancelled(), 30)
    book = LeaseBook(Path("~/.prefect-rlhf/leases"), ClusterShape("local", 1, 2, 8 << 30))
    held = book.acquire("n0:0-1", Holder.now("test", "test"))
    assert isinstance(held, LeasedMesh), f"{held}"
    held.release()


def processes_of(run_id):
    """Processes whose environment names the flow run."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"PREFECT__FLOW_RUN_ID={run_id}".encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
    return found


def wait_until(condition, limit_seconds):
    deadline = time.monotonic() + limit_seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.slow
def test_a_misspelt_key_is_refused_by_the_server(server):
    """Before a flow run exists."""
    from benchmarks.demo.server import DemoFailed

    with pytest.raises(DemoFailed, match="clipp"):
        server.prefect("deployment", "run", "rlhf/ppo", "-p", 'algo={"clipp": 0.2}')
