"""The run's log lines for users, under a logger of their own, because a terminal shows only these lines."""

from logging import Logger

from prefect import get_run_logger
from prefect.logging.loggers import LoggingAdapter, PrefectLogAdapter

RUN_LOG = "prefect.flow_runs.rlhf"  # below Prefect's logger, so that the server stores each line too


def run_log() -> Logger | LoggingAdapter:
    """Return the logger of the current flow run's own lines. Raises MissingContextError outside of a run."""
    log = get_run_logger()
    return log.getChild("rlhf") if isinstance(log, PrefectLogAdapter) else log  # otherwise, logging of the run is off
