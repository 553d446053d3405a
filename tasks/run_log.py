"""The run's own lines for a person, under one logger: a terminal shows these and no others."""

from __future__ import annotations

from logging import Logger

from prefect import get_run_logger
from prefect.logging.loggers import LoggingAdapter, PrefectLogAdapter

RUN_LOG = "prefect.flow_runs.rlhf"  # below Prefect's own, so that the server keeps each line too


def run_log() -> Logger | LoggingAdapter:
    """Return the logger of the current flow run's own lines. Raises MissingContextError outside of a run."""
    log = get_run_logger()
    return log.getChild("rlhf") if isinstance(log, PrefectLogAdapter) else log  # else the run's logs are off
