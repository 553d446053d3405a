"""A pipe without writes, which the kernel closes however the process that holds its other end dies.

    python -m prefect_rlhf.files.processes.lifeline DESCRIPTOR MODULE ARGUMENTS...

runs a module of somebody else as `python -m MODULE ARGUMENTS...` does, and ends it with that process.
"""

from __future__ import annotations

import os
import runpy
import select
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

CONTROLLER_GONE = 90
"""Exit status of a process that ended because its controller did."""


def ending_with(lifeline: int, command: Sequence[str]) -> list[str]:
    """Return a command `python ... -m MODULE ...` such that its process, which inherits `lifeline`, ends with it.

    >>> ending_with(7, ["python", "-P", "-m", "http.server", "8000"])
    ['python', '-P', '-m', 'prefect_rlhf.files.processes.lifeline', '7', 'http.server', '8000']
    """
    module = command.index("-m") + 1
    return [*command[:module], __name__, str(lifeline), *command[module:]]


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


def _main() -> None:
    lifeline, module, *arguments = sys.argv[1:]
    exit_with(int(lifeline))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
