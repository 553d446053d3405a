"""Real Prefect, no ranks: a switch as a task run, and SIGTERM before, during and after it."""

import os
import signal
import threading
from types import SimpleNamespace

import pytest
from prefect import flow

from prefect_rlhf.errors.errors import RankLost
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.switch import PlanAt
from prefect_rlhf.tasks.running.journal import Journal, read_spans
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.stop_request import STOP_POLL_SECONDS, StopRequest
from prefect_rlhf.tasks.running.switch import run_switch
from tests.support.cases import first
from tests.support.strategies import TWO_DEVICES, ppo
from tests.tasks import row_world

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

SPLIT, FLATTENING = (preset(name, ppo(), TWO_DEVICES, TWO_DEVICES.whole) for name in ("split", "flattening"))
PHASES = ["switches", "switch_from", "switched"]


class Stage:
    """The audience of a switch, and the work of its ranks; `do` is called in one of the phases."""

    def __init__(self, phase="", do=None):
        self.seen, self.closed, self._phase, self._do = [], [], phase, do

    def dispatcher(self, run, gang, before=None):
        return SimpleNamespace(run=run, gang=gang, switch_from=self.switch_from)

    def switch_from(self, before, on_built):
        self._enter("switch_from")
        return NodeOutcome(seconds=0.0, device_bytes={}, resident_bytes={}, store_bytes={})

    def switches(self, run):
        self._enter("switches")

    def switched(self, run, seconds):
        self._enter("switched")

    def built(self, instance, outcome):
        raise AssertionError("no instance is built here")

    def _enter(self, phase):
        self.seen.append(phase)
        if phase == self._phase:
            self._do()


def switch(folder, monkeypatch, stage):
    """Switch from `split` to `flattening` before step 3, in a flow; return the flow's state and the request to stop."""
    monkeypatch.setattr(run_switch, "Dispatcher", stage.dispatcher)
    run = row_world.training_run(row_world.with_operations(ppo()), SPLIT, 6, folder)
    before = stage.dispatcher(run, SimpleNamespace(close=lambda: stage.closed.append(True)))
    stops = []

    def body():
        stops.append(StopRequest())
        after = run_switch.switch_to(PlanAt(3, FLATTENING), before, Journal(folder), stage, stops[0])
        return after.run.finished + 1, after.run.plan.name

    return flow(body, name="test")(return_state=True), stops[0]


def terminate():
    threading.Event().wait(STOP_POLL_SECONDS / 2)  # until the main thread waits
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(2 * STOP_POLL_SECONDS)  # until it is noticed


@pytest.mark.parametrize("phase", first(1, PHASES))
def test_sigterm_at_a_switch_waits_for_its_end(tmp_path, monkeypatch, phase):
    """Also before the ranks begin and after they have ended, while the run reports: no step would be lost."""
    stage = Stage(phase, terminate)
    state, stop = switch(tmp_path, monkeypatch, stage)
    assert state.is_completed() and state.result() == (3, "flattening")
    assert stage.seen == PHASES and stop and str(stop) == "SIGTERM" and not stage.closed
    (span,) = read_spans(tmp_path)
    assert (span.kind, span.title, span.step) == ("switch", "switch · step 3 · split → flattening", 3)


def test_a_lost_rank_ends_a_switch_with_its_own_error(tmp_path, monkeypatch):
    def lose_a_rank():
        raise RankLost("rank 1 was killed by SIGKILL in build actor.vllm")

    stage = Stage("switch_from", lose_a_rank)
    state, _ = switch(tmp_path, monkeypatch, stage)
    assert state.is_failed() and "rank 1 was killed by SIGKILL in build actor.vllm" in state.message
    assert stage.seen == PHASES[:2] and not [*tmp_path.glob("task_runs.jsonl")]
