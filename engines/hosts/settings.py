"""How host functions run: the number of processes, the time limit per row, and the treatment of failed rows."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of a `HostPool`. `HostRewards` states their bounds.

    workers: processes, each of one CPU.
    deadline_seconds: limit of a row's call, in seconds of wall time; the import of its module does not count.
    retries: how many times a failed row is tried again.
    failed_value: the value of a failed row; None: it is NaN, and the row gets weight 0.
    most_failed: largest share of the rows of a `score`, 0 to 1, that may fail; above it the call raises.
    """

    workers: int
    deadline_seconds: float = 30.0
    retries: int = 1
    failed_value: float | None = None
    most_failed: float = 0.1

    @property
    def value_of_failed(self) -> float:
        return math.nan if self.failed_value is None else self.failed_value
