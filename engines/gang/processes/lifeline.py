"""A pipe without writes, which the kernel closes however the controller ends."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

CONTROLLER_GONE = 90
"""Exit status of a process that ended because its controller did."""


def exit_with(lifeline: int) -> None:
    """From now on, end this process as soon as `lifeline` ends, even while the main thread computes."""
    threading.Thread(target=_await_end, args=(lifeline, None), daemon=True, name="lifeline").start()


@contextmanager
def exiting_with(lifeline: int) -> Iterator[None]:
    """Like `exit_with`, but only while a block runs. Afterwards the thread has ended, so the process may fork."""
    stopped, stop = os.pipe()
    thread = threading.Thread(target=_await_end, args=(lifeline, stopped), daemon=True, name="lifeline")
    thread.start()
    try:
        yield
    finally:
        os.close(stop)
        thread.join()
        os.close(stopped)


def _await_end(lifeline: int, stopped: int | None) -> None:
    watched = [lifeline] if stopped is None else [lifeline, stopped]
    ready, _, _ = select.select(watched, [], [])
    if stopped not in ready:
        os._exit(CONTROLLER_GONE)  # no clean-up: another thread may hang in a collective forever
