"""A run's log before it has one: where planning says what it does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import Logger

from prefect import get_run_logger
from prefect.exceptions import MissingContextError
from prefect.logging import get_logger
from prefect.logging.loggers import LoggingAdapter

LogLine = Callable[[str], None]


def log_info(line: str) -> None:
    """Write a line to the flow run's log; outside of a run, to the terminal's."""
    _log().info("%s", line)


def log_warning(line: str) -> None:
    """Write a line that a person should see, to the same log."""
    _log().warning("%s", line)


def _log() -> Logger | LoggingAdapter:
    try:
        return get_run_logger()
    except MissingContextError:
        return get_logger("prefect_rlhf.plan")


@contextmanager
def engines_in_log() -> Iterator[None]:
    """Have the run's log show what engines warn of: a store that is waited for, in this process or in a rank's."""
    handler, logger = _ToRunLog(), logging.getLogger("prefect_rlhf.engines")
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated


class _ToRunLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            log_warning(record.getMessage())
