"""Requests to end a run early and cleanly: suspension of the flow run, SIGTERM, early stopping, or a failure to learn.

In each case the steps in flight finish, a checkpoint is written, and the process ends as Prefect expects. After early
stopping the run is Completed.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from prefect._internal.control_listener import get_intent
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, TerminationSignal

from prefect_rlhf.errors.errors import RlhfError

STOP_POLL_SECONDS = 1.0  # longest delay until a request to stop is noticed


class StopRequest:
    """Whether the current flow run was asked to stop. Must be created in the thread that called the flow.

    Prefect's own handler of SIGTERM stays installed, and raises TerminationSignal in that thread. Without that handler,
    Prefect would not notice cancellations.
    """

    def __init__(self) -> None:
        context = FlowRunContext.get()
        self._suspension = None if context is None else context.flow_run_suspension_request
        self._terminated = False
        self._enough: str | None = None
        self._error: RlhfError | None = None

    def __bool__(self) -> bool:
        return self._terminated or self._is_suspended or self._enough is not None

    def __str__(self) -> str:
        return "SIGTERM" if self._terminated else "suspended" if self._is_suspended else self._enough or "not asked"

    @property
    def is_end(self) -> bool:
        """Whether the run ended by early stopping, without an earlier request to suspend or terminate."""
        return self._enough is not None and not self._terminated and not self._is_suspended

    def end(self, reason: str, error: RlhfError | None = None) -> None:
        """Request the final end of the run, from any thread, with an error if it failed; the first reason counts."""
        if self._enough is None:
            self._enough, self._error = reason, error

    def check(self) -> None:
        """Raise the error that ended the run, unless the run was also suspended or terminated."""
        if self.is_end and self._error is not None:
            raise self._error

    @property
    def _is_suspended(self) -> bool:
        return self._suspension is not None and self._suspension.is_requested()

    def take_notice(self, termination: TerminationSignal) -> None:
        """Treat the first SIGTERM as a request. Re-raise a second SIGTERM or a cancellation, to end at once."""
        if self._terminated or get_intent() is not None:
            raise termination
        self._terminated = True

    @contextmanager
    def not_to_interrupt(self) -> Iterator[None]:
        """Allow the body to start task runs and subflow runs although the flow run is suspended, to finish the step."""
        context = FlowRunContext.get()
        if context is None:
            yield
            return
        with context.model_copy(update={"flow_run_suspension_request": type(context.flow_run_suspension_request)()}):
            yield

    def leave(self) -> NoReturn:
        """End the flow run as requested. Raises Pause or TerminationSignal."""
        if self._terminated:
            raise TerminationSignal(signal=signal.SIGTERM)
        assert self._suspension is not None  # else there was no request
        raise Pause(state=self._suspension.get_state())
