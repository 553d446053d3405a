"""How host functions run: the number of processes, the time limit per row, and the treatment of failed rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefect_rlhf.placement.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of a `HostPool`.

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

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise InvalidInput("hosts.workers", self.workers, "at least 1 process")
        if not 0 < self.deadline_seconds < math.inf:
            raise InvalidInput("hosts.deadline_seconds", self.deadline_seconds, "seconds above 0, not infinite")
        if self.retries < 0:
            raise InvalidInput("hosts.retries", self.retries, "0 or more")
        if self.failed_value is not None and not math.isfinite(self.failed_value):
            raise InvalidInput("hosts.failed_value", self.failed_value, "a finite number, or None for weight 0")
        if not 0 <= self.most_failed <= 1:
            raise InvalidInput("hosts.most_failed", self.most_failed, "a share of the rows, 0 to 1")

    @property
    def value_of_failed(self) -> float:
        return math.nan if self.failed_value is None else self.failed_value
