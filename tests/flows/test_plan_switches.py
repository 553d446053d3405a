"""Runs that switch from plan to plan between steps: real Prefect, gang and engines, models of plan_matrix."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.replan import plan_switcher
from prefect_rlhf.flows.training.replan.price_check import STEPS_AWAITED
from prefect_rlhf.placement.cost.datasheets.correction import Correction
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.planner.fitted_constants import FittedConstants
from prefect_rlhf.placement.planner.recheck import Recheck
from prefect_rlhf.placement.plans.plan_file import read_plan
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import read_spans
from prefect_rlhf.tasks.running.rank_calls import RankCalls
from prefect_rlhf.tasks.running.stop_request import STOP_POLL_SECONDS
from tests.support import plan_matrix
from tests.support.plan_matrix import plan
from tests.support.runs import (
    Result,
    end,
    environment,
    leased,
    loss_difference,
    plan_file,
    prepared,
    wait_for,
    weight_difference,
    whole,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

TOLERANCE = 1e-5
STEPS = 4
PLANS = {
    "replicas": plan("0-1 dp2 engine=vllm", "0", "1", "0-1 dp2", "0-1 dp2", "0-1 dp2"),
    "split": plan("0-1 tp2 engine=vllm parts=2", "0", "1", "0-1 dp2", "0-1 tp2", "0-1 pp2 micro_batches=2"),
    "turns": plan("0 engine=vllm offload=all", "0", "1 offload=all", "0-1 pp2", "0 offload=optimizer", "0-1 dp2"),
}
DESK = whole(ClusterShape("matrix", 1, 2, 8 << 30))


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    folder = tmp_path_factory.mktemp("switches")
    algo = {"kl": {"kind": "adaptive", "target": 0.5, "horizon": 50.0}, "normalise_scores": True}
    given = plan_matrix.parameters(folder)
    files = {name: str(plan_file(compact, folder / f"{name}.json")) for name, compact in PLANS.items()}
    return given | {"algo": given["algo"] | algo, "steps": STEPS}, files


def run(given, **changes):
    with leased(2):
        return Result.of(end(ppo, given | changes))


def by_step(files):
    return {1: files["replicas"], 3: files["split"], 4: files["turns"]}


@pytest.fixture(scope="module")
def stayed(parameters):
    given, files = parameters
    return run(given, plan=files["replicas"])


@pytest.fixture(scope="module")
def switched(parameters):
    given, files = parameters
    return run(given, plan=by_step(files))


def assert_equal(one, other):
    assert one.tokens == other.tokens and len(one.tokens) == STEPS
    assert loss_difference(one, other) < TOLERANCE
    assert weight_difference(one, other) < TOLERANCE


def test_a_run_that_switches_is_the_run_that_stays(parameters, stayed, switched):
    """Tokens, losses and weights. A switch is a task run, and leaves no more on devices than the next plan keeps."""
    given, files = parameters
    assert_equal(switched, stayed)
    switches = [span for span in read_spans(switched.run_dir) if span.kind == "switch"]
    assert [span.title for span in switches] == [
        "switch · step 3 · replicas → split",
        "switch · step 4 · split → turns",
    ]
    assert all(span.predicted_seconds > 0 and span.seconds > 0 for span in switches)
    _, *later = prepared(ppo, given | {"plan": by_step(files)}, DESK).plans
    for step, at in zip((3, 4), later, strict=True):
        held = dict(at.chosen.certificate.most_resident)
        for rank in ("0", "1"):
            found = max(span.device_bytes.get(rank, 0) for span in read_spans(switched.run_dir) if span.step == step)
            assert found <= held[f"n0:{rank}"] <= 1.001 * found, (step, rank)
    assert list(yaml.safe_load((switched.run_dir / "plans.yaml").read_text())) == [1, 3, 4]
    assert "turns" in (switched.run_dir / "plan.yaml").read_text()


@pytest.mark.all
def test_the_file_of_its_plans_repeats_a_run(parameters, switched):
    given, _ = parameters
    again = run(given, plan=str(switched.run_dir / "plans.yaml"))
    assert again.tokens == switched.tokens and weight_difference(again, switched) == 0


@pytest.mark.all
@pytest.mark.parametrize(
    "doing", ["close models", "build actor.vllm", "list the state", "restore actor", "offload", "free copies"]
)
def test_a_run_that_loses_a_rank_while_it_switches_goes_on_under_the_next_plan(
    parameters, stayed, monkeypatch, doing, tmp_path
):
    """In each phase of a switch; the last checkpoint is that of the step before."""
    given, files = parameters
    given = given | {"plan": by_step(files), "checkpoint_every": 1, "output_dir": str(tmp_path / "runs")}
    call, switch_from, switching = RankCalls.__call__, Dispatcher.switch_from, []

    def harmed(self, method, arguments, what, *rest, **more):
        if switching and what.startswith(doing):
            os.kill(switching.pop(), signal.SIGKILL)
        return call(self, method, arguments, what, *rest, **more)

    def with_a_victim(after, *arguments):
        switching.append(max(children(after.gang.process_group)))
        return switch_from(after, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RankCalls, "__call__", harmed)
        patch.setattr(Dispatcher, "switch_from", with_a_victim)
        with leased(2):
            failed = end(ppo, given)
    assert failed.is_failed() and "rank" in failed.message
    (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert_equal(run(given, resume_from=str(run_dir)), stayed)


@pytest.mark.all
def test_sigterm_during_a_switch_lets_it_end_and_the_run_goes_on_later(parameters, stayed, tmp_path):
    """The switch is of the killed run; the step after it is the last, because no checkpoint falls on its own."""
    given, files = parameters
    given = given | {"plan": by_step(files), "output_dir": str(tmp_path / "runs")}
    (tmp_path / "parameters.json").write_text(
        json.dumps(given | {"plan": {str(at): name for at, name in by_step(files).items()}})
    )
    file, module = str(tmp_path / "parameters.json"), "tests.flows.stopped_run"
    line = [sys.executable, "-m", module, "ppo", file, "2", "switch@3", "pipe"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(line, env=environment(), cwd=Path(__file__).parents[2], **output)
    try:
        pipe = wait_for(lambda: next((tmp_path / "runs").glob("*/pipe"), None), process)
        process.send_signal(signal.SIGTERM)
        time.sleep(2 * STOP_POLL_SECONDS)
        pipe.write_text("")
        said, _ = process.communicate(timeout=240)
    finally:
        process.kill()
    assert "SIGTERM: step 3 is the last step; a checkpoint follows" in said
    ended = read_spans(pipe.parent)
    assert [span.title for span in ended if span.kind == "switch"] == ["switch · step 3 · replicas → split"]
    assert max(span.step for span in ended if span.kind == "train_step") == 3
    assert_equal(run(given, resume_from=str(pipe.parent)), stayed)


def children(pid):
    """The processes that a fork server has started: the ranks, and no process of an engine."""
    return [int(child) for file in Path(f"/proc/{pid}/task").glob("*/children") for child in file.read_text().split()]


class Found:
    """A check that has ended with a plan that saves half of a step."""

    ended = True

    def __init__(self, plan):
        self.plan = plan

    def answer(self):
        fitted = FittedConstants(Correction(compute=0.5), 3.0, 1.0)
        return Recheck(fitted, 2000.0, 1000.0, self.plan)

    def close(self):
        pass


@pytest.mark.all  # tests/flows/training/replan/test_plan_switcher.py has the decision
def test_a_run_switches_on_its_own_and_its_plans_repeat_it(parameters, monkeypatch):
    """Without a stop, between two steps that the check's answer falls on; a resumed run would know the plan."""
    given, files = parameters
    given = given | {"steps": 12, "plan": "flattening"}
    split = read_plan(files["split"], DESK.cluster)
    monkeypatch.setattr(plan_switcher, "begun_recheck", lambda *_, **__: Found(split))
    switched = run(given, replan="switch", replan_every=5)
    stayed = run(given, replan="off")
    assert switched.tokens == stayed.tokens
    assert weight_difference(switched, stayed) < TOLERANCE
    (switch,) = (span for span in read_spans(switched.run_dir) if span.kind == "switch")
    assert STEPS_AWAITED < switch.step <= 12 and switch.predicted_seconds > 0
    assert switch.title == f"switch · step {switch.step} · flattening → replanned-1"
    assert json.loads((switched.run_dir / "replan.json").read_text())["best_seconds"] == 1000.0
    again = run(given, plan=str(switched.run_dir / "plans.yaml"))
    assert again.tokens == switched.tokens and weight_difference(again, switched) == 0


@pytest.mark.all
def test_a_run_killed_after_its_own_switch_resumes_with_its_plans(parameters, monkeypatch, tmp_path):
    """The resumed run is, bit for bit, the run that makes the same switches without a stop."""
    given, files = parameters
    given = given | {"steps": 12, "plan": "flattening", "checkpoint_every": 2, "output_dir": str(tmp_path / "runs")}
    switching = {"replan": "switch", "replan_every": 5}
    split, execute = read_plan(files["split"], DESK.cluster), Dispatcher.execute
    monkeypatch.setattr(plan_switcher, "begun_recheck", lambda *_, **__: Found(split))

    def harmed(self, node):
        if node.id == "actor_train@10":
            os.kill(max(children(self.gang.process_group)), signal.SIGKILL)
        return execute(self, node)

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "execute", harmed)
        with leased(2):
            failed = end(ppo, given | switching)
    assert failed.is_failed() and "rank" in failed.message
    (run_dir,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    resumed = run(given | switching, resume_from=str(run_dir))
    plans = [yaml.safe_load((folder / "plans.yaml").read_text()) for folder in (run_dir, resumed.run_dir)]
    assert plans[0] == plans[1] and len(plans[0]) == 2
    again = run(given, plan=str(run_dir / "plans.yaml"))
    assert again.tokens == resumed.tokens and weight_difference(again, resumed) == 0
