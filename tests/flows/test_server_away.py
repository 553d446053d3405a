"""A real Prefect server is killed in the middle of a real run and comes back with its database: nothing is lost.

The run is a process of its own, started as a person does from the command line; the server is killed with SIGKILL as
soon as a node has ended, and is away for longer than the rest of the run would take.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from prefect.types._datetime import from_timestamp, parse_datetime

from prefect_rlhf.flows.ppo import ppo
from tests.blocks.prefect_site import PrefectSite
from tests.support import plan_matrix
from tests.support.plan_matrix import ALONE
from tests.support.runs import Result, completed, leased, plan_file

pytestmark = [pytest.mark.slow, pytest.mark.all]  # tests/tasks/server/ loses ends of task runs in seconds

COMMAND = Path(sys.executable).with_name("prefect-rlhf")
STEPS = 6
CLOCKS = ("seconds", "orchestration_share", "fingerprint_share")
APART = timedelta(seconds=5)
"""More than a node's work begins before its task run, less than the server is away."""


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("away")
    given = plan_matrix.parameters(folder)
    return given | {"steps": STEPS, "steps_per_group": 2, "plan": str(plan_file(ALONE, folder / "one.json"))}


@pytest.fixture(scope="module")
def undisturbed(prefect, parameters):
    """The same run with a server that stays."""
    with leased(1):
        return Result.read(completed(ppo, parameters))


@pytest.fixture
def site(tmp_path):
    """A server of this test's own, and a home without leases."""
    site = PrefectSite(tmp_path)
    site.environment["HOME"] = str(tmp_path)
    try:
        site.start_server()
        yield site
    finally:
        site.close()


def run_with_server_away(site, parameters, node, seconds, **environment):
    """Kill the server once `node` has ended, start it again after `seconds`; the run's folder and what it said."""
    folder = site.folder
    (folder / "parameters.json").write_text(json.dumps({**parameters, "output_dir": str(folder / "runs")}))
    line = [str(COMMAND), "ppo", "--parameters", str(folder / "parameters.json")]
    with (folder / "run.log").open("wb") as log:
        run = subprocess.Popen(
            line, env=site.environment | environment, cwd=Path(__file__).parents[2], stdout=log, stderr=log
        )
    try:
        wait_for_node(folder, node, run)
        os.killpg(site.processes.pop("server").pid, signal.SIGKILL)
        time.sleep(seconds)
        site.start_server()
        run.wait(300)
    finally:
        run.kill()
    return (folder / "runs" / "latest").resolve(), (folder / "run.log").read_text()


def wait_for_node(folder, node, run):
    """Return as soon as the run has recorded the end of a node."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert run.poll() is None, (folder / "run.log").read_text()[-2000:]
        if any(f'"node": "{node}"' in file.read_text() for file in (folder / "runs").glob("*/task_runs.jsonl")):
            return
        time.sleep(0.01)
    raise AssertionError(f"{node} never ended")


def assert_nothing_is_lost(site, run_dir, said, undisturbed, steps_per_group=2):
    """Weights and metrics are those of an undisturbed run; the server has every task run with its end and times."""
    assert said.splitlines()[-2].startswith("train: prefect-rlhf run ppo"), said[-2000:]
    result = Result.read(run_dir)
    assert without_clocks(result.metrics) == without_clocks(undisturbed.metrics)
    assert result.tokens == undisturbed.tokens
    for role, weights in undisturbed.weights.items():
        assert all(result.weights[role][name].equal(values) for name, values in weights.items())
    flow_runs = site.ask("/flow_runs/filter", {"limit": 200})
    assert {flow_run["state_type"] for flow_run in flow_runs} == {"COMPLETED"}
    groups = [flow_run["id"] for flow_run in flow_runs if flow_run["parent_task_run_id"]]
    assert len(groups) == -(-STEPS // steps_per_group)  # the export is in the last
    task_runs = [run for group in groups for run in task_runs_of(site, group)]
    spans = {span["title"]: span for span in result.spans}
    assert sorted(run["name"] for run in task_runs) == sorted(spans)
    for run in task_runs:
        span = spans[run["name"]]
        assert run["state_type"] == "COMPLETED", run["name"]
        late = parse_datetime(run["start_time"]) - from_timestamp(span["start"])
        assert abs(late) < APART, run["name"]
        assert from_timestamp(span["end"]) <= parse_datetime(run["end_time"]), run["name"]
    logs = site.ask("/logs/filter", {"limit": 200, "logs": {"level": {"ge_": 20}}, "sort": "TIMESTAMP_DESC"})
    assert sum(log["message"].startswith(f"step {STEPS} of {STEPS} ·") for log in logs) == 1
    progress = site.ask("/artifacts/latest/filter", {"artifacts": {"key": {"any_": ["metrics"]}}})
    assert f'"step": "{STEPS}"' in progress[0]["data"]


def without_clocks(metrics):
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in metrics]


def task_runs_of(site, group):
    return site.ask("/task_runs/filter", {"limit": 200, "flow_runs": {"id": {"any_": [group]}}})


def test_an_outage_within_a_group_does_no_harm(site, parameters, undisturbed):
    """The rest of the group runs without it, the group after next waits for it."""
    run_dir, said = run_with_server_away(site, parameters, "actor_generate@2", seconds=12)
    assert_nothing_is_lost(site, run_dir, said, undisturbed)


@pytest.mark.parametrize(
    ("node", "steps_per_group", "seconds"),
    [
        ("reward_inference@1", 2, 300),
        ("critic_train@2", 1, 30),
        ("actor_generate@1", STEPS + 1, 30),
        (f"critic_train@{STEPS - 1}", 2, 30),
    ],
    ids=["five minutes", "between groups", "within the only group", "at the end"],
)
def test_an_outage_at_another_moment_does_no_harm(site, parameters, undisturbed, node, steps_per_group, seconds):
    given = parameters | {"steps_per_group": steps_per_group}
    run_dir, said = run_with_server_away(site, given, node, seconds)
    assert_nothing_is_lost(site, run_dir, said, undisturbed, steps_per_group)


def test_a_lasting_outage_ends_the_run_with_one_line_that_names_the_server(site, parameters):
    _, said = run_with_server_away(site, parameters, "actor_generate@2", 60, PREFECT_RLHF_SERVER_PATIENCE_SECONDS="10")
    assert said.splitlines()[-1].startswith(f"prefect-rlhf: the Prefect server at {site.api} has not answered for ")
