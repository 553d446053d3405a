"""How host functions are run: how many processes, how long a row may take, and what becomes of rows that fail."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prefect_rlhf.placement.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings of a `HostPool`.

    workers: processes, each of one CPU.
    deadline_seconds: seconds of wall time that a call for one row may take, its module being imported already.
    retries: how many times a row is tried again before it fails.
    failed_value: the value of a row that failed; None: it is NaN, and the row gets weight 0.
    most_failed: share of the rows of one `score`, 0 to 1, that may fail; above it the call raises.
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
