"""A node's measurements, combined over its ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect_rlhf.engines.commands import Measurements, RankReport


@dataclass(frozen=True, kw_only=True)
class NodeOutcome(Measurements[Mapping[str, int]]):
    """A node's measurements; memory is by rank. `gpu` has GpuMemory's fields by name; it is empty on CPU."""

    gpu: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def outcome_of(reports: Mapping[int, RankReport]) -> NodeOutcome:
    """Combine a node's reports: the slowest rank's seconds, and all bytes and tokens. A transfer may need no rank.

    If ranks report equal metrics, these cover all rows. Otherwise metrics are averaged, weighted by the number of rows
    or tokens that each rank's metric covers. `peak_extra_bytes` is the maximum over ranks.
    """
    by_rank = sorted(reports.items())
    return NodeOutcome(
        seconds=max((report.seconds for report in reports.values()), default=0.0),
        fingerprint_seconds=max((report.fingerprint_seconds for report in reports.values()), default=0.0),
        bytes_moved=sum(report.bytes_moved for report in reports.values()),
        num_tokens=sum(report.num_tokens for report in reports.values()),
        peak_extra_bytes=max((report.peak_extra_bytes for report in reports.values()), default=0),
        device_bytes={str(rank): report.device_bytes for rank, report in by_rank},
        resident_bytes={str(rank): report.resident_bytes for rank, report in by_rank},
        store_bytes={str(rank): report.store_bytes for rank, report in by_rank},
        gpu={str(rank): report.gpu._asdict() for rank, report in by_rank if report.gpu},
        metrics=mean_metrics([report for _, report in by_rank if report.metrics]),
        metric_rows=dict(sum((Counter(report.metric_rows) for _, report in by_rank), Counter[str]())),
    )


def mean_metrics(reports: Sequence[Measurements[Any]]) -> Mapping[str, float]:
    """Combine metrics from ranks or parts that each cover some of the rows."""
    if not reports or all(report.metrics == reports[0].metrics for report in reports):
        return reports[0].metrics if reports else {}
    names = dict.fromkeys(name for report in reports for name in report.metrics)
    return {name: _mean(name, [report for report in reports if name in report.metrics]) for name in names}


def _mean(name: str, reports: Sequence[Measurements[Any]]) -> float:
    """Return the mean of a metric over the rows, or the tokens, of those that report it."""
    weights = [report.metric_rows.get(name, report.num_tokens) for report in reports]
    weighted = math.fsum(weight * report.metrics[name] for weight, report in zip(weights, reports, strict=True))
    return weighted / max(sum(weights), 1)
