"""Counts by the line of code: of operations that make the host wait for the device, and of all operations."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

OURS, MEGATRON = "/prefect_rlhf/", "/megatron/core/"


class Counts:
    """A counter by place and kind, as in `engines/losses/mean_over.py:47 copy`."""

    def __init__(self) -> None:
        self.by_place: Counter[str] = Counter()

    def count(self, kind: str, times: int = 1) -> None:
        """Count for the line of ours, or of Megatron, that runs now."""
        self.by_place[f"{_place()} {kind}"] += times

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Count in a block into a counter of its own."""
        before, self.by_place = self.by_place, Counter()
        try:
            yield self.by_place
        finally:
            self.by_place = before + self.by_place


def _place() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        for folder in (OURS, MEGATRON):
            if folder in name:
                return f"{name.rpartition(folder)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"
