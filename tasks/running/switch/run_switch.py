"""Switches a run to another plan between two steps: a task run of its own, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Protocol

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.augmented.node import SWITCH
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.plans.switch import PlanAt
from prefect_rlhf.tasks.running.dispatch import Dispatcher
from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan, measured_on
from prefect_rlhf.tasks.running.outcome import NodeOutcome
from prefect_rlhf.tasks.running.stop_request import STOP_POLL_SECONDS, StopRequest
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.server.failures import failed_task_run


class Builder(Protocol):
    """Is told about each model that is built, and about each switch."""

    def built(self, instance: ModelInstance, outcome: NodeOutcome) -> None: ...

    def switches(self, run: TrainingRun) -> None: ...

    def switched(self, run: TrainingRun, seconds: float) -> None: ...


def switch_to(switch: PlanAt, before: Dispatcher, journal: Journal, audience: Builder, stop: StopRequest) -> Dispatcher:
    """Switch the ranks to the run's next plan, after all steps so far have ended; return that plan's dispatcher.

    A request to stop waits for the end of the switch, with its reports. Raises the switch's error.
    """
    with stop.not_to_interrupt():
        return _ended(lambda: _switched(switch, before, journal, audience), before, stop)


def _switched(switch: PlanAt, before: Dispatcher, journal: Journal, audience: Builder) -> Dispatcher:
    run = before.run.under(switch.plan, switch.step)
    after = Dispatcher(run, before.gang, before)
    audience.switches(run)
    title = f"switch · step {switch.step} · {before.run.plan.name} → {switch.plan.name}"

    def work() -> State[Any] | None:
        start = time.time()
        try:
            outcome = after.switch_from(before, audience.built)
        except RlhfError as error:
            return failed_task_run(error)
        end = time.time()
        outcome = replace(outcome, seconds=end - start)
        measured = measured_on(run.lease, run.lease.devices, (start, end), outcome)
        node = f"{SWITCH}@{switch.step}"
        journal.record(TaskRunSpan(node=node, title=title, kind=SWITCH, call=None, step=switch.step, **measured))
        return None

    task = Task(fn=work, name=SWITCH, task_run_name=title, cache_policy=NO_CACHE, persist_result=False)
    began = time.perf_counter()
    state = task(return_state=True)
    if not state.is_completed():
        error = state.result(raise_on_failure=False)
        raise error if isinstance(error, BaseException) else RlhfError(f"{title}: {state.name}: {state.message}")
    audience.switched(run, time.perf_counter() - began)
    return after


def _ended(switch: Callable[[], Dispatcher], before: Dispatcher, stop: StopRequest) -> Dispatcher:
    """Return the result of a switch, made in a thread: signals go to this thread, and may interrupt it anywhere."""
    with ThreadPoolExecutor(1, thread_name_prefix="switch") as thread:
        ended = thread.submit(copy_context().run, switch)
        try:
            while not ended.done():  # it ends, because each call has a deadline
                try:
                    wait({ended}, STOP_POLL_SECONDS)
                except TerminationSignal as termination:
                    stop.take_notice(termination)
        except BaseException:  # a cancellation: without a gang the calls of the thread fail at once
            before.gang.close()
            raise
        return ended.result()
