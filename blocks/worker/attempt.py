"""Run this process's flow run: a `python -m prefect.engine` that reports a failure in one line.

    python -m prefect_rlhf.blocks.worker.attempt

Prefect's engine loads and runs the flow. The exit status reports the end: 0 if the server has the final state, 1 for a
failure, MISTAKE for a failure that a person must fix, STOPPED after a SIGTERM, RESTART if the run may start again. With
RESTART the run keeps its state until the worker has seen the end of its last process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import UUID

import httpx
from prefect._internal.control_listener import configure_from_env
from prefect._internal.metrics import RunMetrics
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.engine import handle_engine_signals
from prefect.exceptions import Abort, TerminationSignal
from prefect.flow_engine import AsyncFlowRunEngine, FlowRunEngine, load_flow, load_flow_run
from prefect.logging.loggers import flow_run_logger
from prefect.states import AwaitingRetry, Failed
from prefect.utilities.callables import call_with_parameters, get_call_parameters, parameters_to_args_kwargs

from prefect_rlhf.blocks.worker.process_end import MISTAKE, RESTART, STOPPED, leave_reason
from prefect_rlhf.blocks.worker.restarts import Restarts
from prefect_rlhf.errors.errors import MISTAKES, InvalidInput

if TYPE_CHECKING:
    from prefect.client.schemas.objects import FlowRun
    from prefect.flows import Flow
    from prefect.results import ResultStore

FAILED = 1
SERVER_SECONDS = 600.0  # the default wait of a run for its server
NO_CRASH = {"PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR": "reschedule"}  # the worker sets the state after a SIGTERM


class RestartAsked(Abort):
    """The run failed and may start again; its state is not changed."""

    def __init__(self, state: State[Any]) -> None:
        super().__init__(state.message)
        self.state = state  # for the log's last line


@dataclass
class Outcome:
    """Why the flow failed, and whether it may start again."""

    restarts: Restarts
    failure: object = None

    def failed(self, failure: object, reason: str) -> None:
        """Record a failure. Raises RestartAsked if a restart is left and no mistake has to be fixed by a person."""
        self.failure = failure
        if self.restarts.are_left and not isinstance(failure, MISTAKES):
            leave_reason(reason)
            raise RestartAsked(AwaitingRetry(message=f"restart {self.restarts.next}: {reason}"))

    def see_result(self, result: object) -> None:
        """Record the failure of a flow that returned a failed state."""
        if isinstance(result, State) and result.is_failed():
            self.failed(result.data, result.message or "")

    def see_exception(self, exc: Exception, msg: str | None) -> None:
        """Record an exception of the flow; Prefect gives a message only for wrong parameters."""
        if msg is None:
            self.failed(exc, f"{type(exc).__name__}: {exc}")
        else:
            self.failure = InvalidInput("parameters", "", str(exc))


@dataclass
class AttemptEngine(FlowRunEngine[Any, Any]):
    """Prefect's engine that also records why the flow failed, and requests a restart if a restart is left."""

    outcome: Outcome = field(default_factory=lambda: Outcome(Restarts()))

    def call_flow_fn(self) -> Any:
        if not self.flow.isgenerator:
            return super().call_flow_fn()
        items: Any = call_with_parameters(self.flow.fn, self.parameters or {})
        for _ in items:
            pass
        return self.handle_success(None)

    def handle_success(self, result: Any) -> Any:
        self.outcome.see_result(result)
        return super().handle_success(result)

    def handle_exception(
        self, exc: Exception, msg: str | None = None, result_store: ResultStore | None = None
    ) -> State[Any]:
        self.outcome.see_exception(exc, msg)
        return super().handle_exception(exc, msg, result_store)


@dataclass
class AsyncAttemptEngine(AsyncFlowRunEngine[Any, Any]):
    """Prefect's engine for async flows, which records failures and requests restarts as AttemptEngine does."""

    outcome: Outcome = field(default_factory=lambda: Outcome(Restarts()))

    async def call_flow_fn(self) -> Any:
        if not self.flow.isgenerator:
            return await super().call_flow_fn()
        items: Any = call_with_parameters(self.flow.fn, self.parameters or {})
        async for _ in items:
            pass
        return await self.handle_success(None)

    async def handle_success(self, result: Any) -> Any:
        self.outcome.see_result(result)
        return await super().handle_success(result)

    async def handle_exception(
        self, exc: Exception, msg: str | None = None, result_store: ResultStore | None = None
    ) -> State[Any]:
        self.outcome.see_exception(exc, msg)
        return await super().handle_exception(exc, msg, result_store)


def run_attempt(flow_run: FlowRun) -> int:
    """Load and run the flow of `flow_run`; return the exit status."""
    logger = flow_run_logger(flow_run)
    try:
        flow: Flow[..., Any] = load_flow(flow_run)
    except Exception as error:  # the author's file may raise anything
        if isinstance(error, MISTAKES):
            logger.error("%s", error)
        else:
            logger.exception("The flow could not be loaded.")
        return _refused(flow_run, f"The flow could not be loaded: {type(error).__name__}: {error}")
    with RunMetrics(flow_run, flow):
        try:
            return _run(flow, flow_run)
        except RestartAsked as asked:
            logger.error("%s", asked)
            return RESTART


def _run(flow: Flow[..., Any], flow_run: FlowRun) -> int:
    try:
        arguments, keywords = parameters_to_args_kwargs(flow.fn, flow_run.parameters)
        parameters = get_call_parameters(flow.fn, arguments, keywords)
    except TypeError as error:  # a missing parameter, or an unknown name
        return _refused(flow_run, f"parameters: {error}")
    outcome = Outcome(Restarts.from_environment())
    if flow.isasync:
        waiting = AsyncAttemptEngine(flow=flow, flow_run=flow_run, parameters=parameters, outcome=outcome)
        state = asyncio.run(_run_async(waiting))
    else:
        engine = AttemptEngine(flow=flow, flow_run=flow_run, parameters=parameters, outcome=outcome)
        with engine.start():
            while engine.is_running():
                with engine.run_context():
                    engine.call_flow_fn()
        state = engine.state
    if not (state.is_failed() or state.is_crashed()):
        return 0
    return MISTAKE if isinstance(outcome.failure, MISTAKES) else FAILED


async def _run_async(engine: AsyncAttemptEngine) -> State[Any]:
    async with engine.start():
        while engine.is_running():
            async with engine.run_context():
                await engine.call_flow_fn()
    return engine.state


def _refused(flow_run: FlowRun, message: str) -> int:
    """Set a run that cannot start to Failed."""
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run.id, Failed(message=" ".join(message.split())))
    return MISTAKE


def _flow_run(flow_run_id: UUID) -> FlowRun:
    """Read the flow run. Retry for SERVER_SECONDS if the server became unreachable after it offered the run."""
    deadline = time.monotonic() + SERVER_SECONDS
    while True:
        try:
            return load_flow_run(flow_run_id)
        except httpx.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _terminate(number: int, _: object) -> NoReturn:
    raise TerminationSignal(signal=number)


def main() -> int:
    """Run the flow run that the environment names; return the exit status."""
    flow_run_id = UUID(os.environ["PREFECT__FLOW_RUN_ID"])
    configure_from_env()
    os.environ.update(NO_CRASH)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with handle_engine_signals(flow_run_id):
            return run_attempt(_flow_run(flow_run_id))
    except TerminationSignal:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
