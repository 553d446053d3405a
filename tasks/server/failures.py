"""Failures and stops in Prefect: the state's message is a single line, and tracebacks of user code are logged once.

A user stops a run with Ctrl-C or with SIGTERM. Under a worker, SIGTERM comes from the worker, which reports its reason.
"""

import logging
import os
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Cancelled, Failed

from prefect_rlhf.errors.errors import RankFailed, RlhfError, RunStopped

TASK_RUN_LOGGER = "prefect.task_runs"
FLOW_RUN_LOGGER = "prefect.flow_runs"
OF_A_WORKER = "PREFECT__FLOW_RUN_ID"  # in the environment of a process that a worker started for a flow run


def failed(error: RlhfError) -> State[Any]:
    """Return the state of a task or flow run that an RlhfError ended; requesting its result raises the error."""
    return Failed(message=f"{type(error).__name__}: {error}", data=error)


def failed_task_run(error: RlhfError) -> State[Any]:
    """Return the state of the task run that raised the error, and write the rank's traceback to its log, once."""
    logging.getLogger(TASK_RUN_LOGGER).addFilter(without_empty_traceback)  # the same function counts once
    if isinstance(error, RankFailed) and error.traceback:
        get_run_logger().error("%s", error.traceback.rstrip())
    return failed(error)


def is_by_hand(error: BaseException) -> bool:
    """Return whether a user stopped the run at a terminal, in a script or in a notebook."""
    return isinstance(error, KeyboardInterrupt) or (
        isinstance(error, TerminationSignal) and OF_A_WORKER not in os.environ
    )


def stopped(error: BaseException) -> State[Any]:
    """Return the state of a flow run that a user stopped; requesting its result raises RunStopped."""
    say_nothing_of_cancelled_runs()
    how = error if isinstance(error, RunStopped) else RunStopped("stopped before the first step")
    return Cancelled(message=str(how), data=how)


def say_nothing_of_cancelled_runs() -> None:
    """Suppress the line that Prefect writes for each cancelled run, so that a run stopped by a user has a single
    line.
    """
    for name in (TASK_RUN_LOGGER, FLOW_RUN_LOGGER):
        logging.getLogger(name).addFilter(without_cancelled)  # the same function counts once


def without_cancelled(record: logging.LogRecord) -> bool:
    """Accept a record unless it reports that a run ended Cancelled."""
    return not record.getMessage().startswith("Finished in state Cancelled")


def without_empty_traceback(record: logging.LogRecord) -> bool:
    """Accept a record, without the `NoneType: None` that Prefect adds for a state that a task run returned."""
    if record.exc_info and record.exc_info[0] is None:
        record.exc_info = None
    return True
