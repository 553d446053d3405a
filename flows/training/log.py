"""Log lines of planning, written to the log of the flow run, or kept until the flow run exists."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import INFO, WARNING, Logger

from prefect.exceptions import MissingContextError
from prefect.logging import get_logger
from prefect.logging.loggers import LoggingAdapter

from prefect_rlhf.tasks.run_log import run_log

LogLine = Callable[[str], None]
BEFORE_A_RUN = "prefect_rlhf.plan"  # the log of planning outside of a run, below Prefect's logger

_kept: ContextVar[list[tuple[int, str]] | None] = ContextVar("rlhf_kept_lines", default=None)


def log_info(line: str) -> None:
    """Write a line to the flow run's log or, outside a run, to the terminal."""
    _write(INFO, line)


def log_warning(line: str) -> None:
    """Write a warning to the same log."""
    _write(WARNING, line)


def log_now(line: str) -> None:
    """Write a line at once, even where lines are kept: it reports the progress of long work."""
    _log().log(INFO, "%s", line)


@contextmanager
def kept_lines() -> Iterator[list[tuple[int, str]]]:
    """Keep the lines that the body logs, with their levels, for the log of a run that starts later."""
    lines: list[tuple[int, str]] = []
    token = _kept.set(lines)
    try:
        yield lines
    finally:
        _kept.reset(token)


def write_kept(lines: Iterable[tuple[int, str]]) -> None:
    """Write kept lines to the log."""
    for level, line in lines:
        _write(level, line)


def _write(level: int, line: str) -> None:
    if (lines := _kept.get()) is not None:
        lines.append((level, line))
    else:
        _log().log(level, "%s", line)


def _log() -> Logger | LoggingAdapter:
    try:
        return run_log()
    except MissingContextError:
        return get_logger(BEFORE_A_RUN)


@contextmanager
def engines_in_log() -> Iterator[None]:
    """Copy warnings of engines and storage, such as waiting for a store, to the run's log, here or in a rank."""
    handler, loggers = _ToRunLog(), [logging.getLogger(f"prefect_rlhf.{room}") for room in ("engines", "files")]
    propagated = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, was in zip(loggers, propagated, strict=True):
            logger.removeHandler(handler)
            logger.propagate = was


class _ToRunLog(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            log_warning(record.getMessage())
