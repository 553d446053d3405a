"""What came of one node's run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prefect_rlhf.engines.commands import RankReport


@dataclass(frozen=True, slots=True)
class NodeOutcome:
    """A node's reports as one: the slowest rank's seconds, the sum of bytes and tokens, the first rank's metrics.

    `peak_extra_bytes` is that of the rank that staged most.
    """

    seconds: float
    fingerprint_seconds: float
    bytes_moved: int
    num_tokens: int
    peak_extra_bytes: int = 0
    device_bytes: Mapping[str, int] = field(default_factory=dict)
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    store_bytes: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, reports: Mapping[int, RankReport]) -> NodeOutcome:
        first = next((report.metrics for _, report in sorted(reports.items()) if report.metrics), {})
        return cls(
            seconds=max(report.seconds for report in reports.values()),
            fingerprint_seconds=max(report.fingerprint_seconds for report in reports.values()),
            bytes_moved=sum(report.bytes_moved for report in reports.values()),
            num_tokens=sum(report.num_tokens for report in reports.values()),
            peak_extra_bytes=max(report.peak_extra_bytes for report in reports.values()),
            device_bytes={str(rank): report.device_bytes for rank, report in sorted(reports.items())},
            resident_bytes={str(rank): report.resident_bytes for rank, report in sorted(reports.items())},
            store_bytes={str(rank): report.store_bytes for rank, report in sorted(reports.items())},
            metrics=first,
        )
