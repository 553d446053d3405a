"""Failures in Prefect: one line as the state's message; of a person's own code the traceback, once, in the log."""

from __future__ import annotations

import logging
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Failed

from prefect_rlhf.placement.errors import RankFailed, RlhfError

TASK_RUN_LOGGER = "prefect.task_runs"


def failed(error: RlhfError) -> State[Any]:
    """Return the state of a task or flow run that an error of ours ended; asking it for a result raises the error."""
    return Failed(message=f"{type(error).__name__}: {error}", data=error)


def failed_task_run(error: RlhfError) -> State[Any]:
    """Return the same for the task run in which the error arose, whose log gets the rank's traceback, once."""
    logging.getLogger(TASK_RUN_LOGGER).addFilter(without_empty_traceback)  # the same function counts once
    if isinstance(error, RankFailed) and error.traceback:
        get_run_logger().error("%s", error.traceback.rstrip())
    return failed(error)


def without_empty_traceback(record: logging.LogRecord) -> bool:
    """Let a record pass, without the `NoneType: None` that Prefect adds for a state that a task run returned."""
    if record.exc_info and record.exc_info[0] is None:
        record.exc_info = None
    return True
