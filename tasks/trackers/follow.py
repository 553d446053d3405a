"""Trackers that follow a run's journal while it trains."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from prefect_rlhf.tasks.running.journal import Journal
from prefect_rlhf.tasks.trackers.tracker import Opener, TrackedRun
from prefect_rlhf.tasks.trackers.tracker_thread import TrackerThread
from prefect_rlhf.tasks.trackers.tracking import TrackerName, Tracking

SECONDS_AT_END = 20.0  # for all trackers together to show their waiting lines
SECONDS_AFTER_ERROR = 2.0  # a stopped run does not wait for its trackers

CLASSES: Mapping[TrackerName, str] = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WandB"}
"""The class of each tracker, in the file with the tracker's name."""


@contextmanager
def followed(
    journal: Journal,
    before: Sequence[Mapping[str, float]],
    tracking: Tracking,
    parameters: Mapping[str, Any],
    warn: Callable[[str], None],
) -> Iterator[None]:
    """Send the journal's lines to the trackers, after the lines `before`.

    At the end the trackers have 20 seconds for waiting lines, or 2 seconds if an error ends the run. Each tracker
    starts anew and receives all lines, so it shows every step of a resumed run once.
    """
    run = TrackedRun(journal.run_dir, journal.run_dir.name, tracking.project, parameters)
    threads = [TrackerThread(each, partial(_opener, each), run, tracking, warn, before) for each in tracking.report_to]
    for thread in threads:
        journal.follow(thread.tell)
    try:
        yield
    except BaseException:  # including a cancellation
        _leave(threads, SECONDS_AFTER_ERROR, has_failed=True)
        raise
    _leave(threads, SECONDS_AT_END, has_failed=False)


def _leave(threads: Sequence[TrackerThread], seconds: float, *, has_failed: bool) -> None:
    """End all trackers within `seconds`."""
    for thread in threads:
        thread.end(has_failed=has_failed)
    until = time.monotonic() + seconds
    for thread in threads:
        thread.wait(until - time.monotonic())


def _opener(name: TrackerName) -> Opener:
    """Import a tracker; the first import of its package takes seconds."""
    opener: Opener = getattr(import_module(f"prefect_rlhf.tasks.trackers.{name}"), CLASSES[name])
    return opener
