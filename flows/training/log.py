"""A run's log before it has one: where planning says what it does."""

from __future__ import annotations

from collections.abc import Callable

from prefect import get_run_logger
from prefect.exceptions import MissingContextError
from prefect.logging import get_logger

LogLine = Callable[[str], None]


def log_info(line: str) -> None:
    """Write a line to the flow run's log; outside of a run, to the terminal's."""
    try:
        get_run_logger().info("%s", line)
    except MissingContextError:
        get_logger("prefect_rlhf.plan").info("%s", line)
