"""A guard of a process: once the pipe that it reads is closed, it kills the process and all below it."""

from __future__ import annotations

import sys
from contextlib import suppress

import psutil


def kill_tree(number: int) -> None:
    """Kill a process and all below it, also those in sessions of their own, such as a temporary server."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(number)
        for each in (*process.children(recursive=True), process):
            with suppress(psutil.NoSuchProcess):
                each.kill()


if __name__ == "__main__":
    sys.stdin.read()
    kill_tree(int(sys.argv[1]))
