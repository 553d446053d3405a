"""Predicted and measured seconds side by side: of each node of a step, and of the step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from prefect_rlhf.placement.schedule import Schedule, steady_seconds
from prefect_rlhf.tasks.journal import Span

WHOLE_STEP = "step"


@dataclass(frozen=True, slots=True)
class Compared:
    """One node of every step, or the whole step.

    `measured_seconds` is the median over steps of what its slowest rank worked; `wall_seconds` that of how long it held
    its devices, orchestration included. `predicted_seconds` is None where the estimate has no such node.
    """

    subject: str
    num_runs: int
    predicted_seconds: float | None
    measured_seconds: float
    wall_seconds: float

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return (
            self.predicted_seconds / self.measured_seconds if self.predicted_seconds and self.measured_seconds else None
        )


def compare(predicted: Schedule, spans: Sequence[Span]) -> list[Compared]:
    """A row for each node of a step in the order in which they began, and one for the step: its steady state.

    The first step is left out where there are others, since it builds and compiles what later ones reuse.
    """
    later = [span for span in spans if span.step > min(span.step for span in spans)] or list(spans)
    seconds = predicted_seconds(predicted)
    runs: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(later, key=lambda span: span.start):
        runs[subject_of(span.node)].append(span)
    rows = [_compared(subject, of_subject, seconds.get(subject)) for subject, of_subject in runs.items()]
    return [*rows, _whole_step(predicted, spans)] if spans else rows


def predicted_seconds(schedule: Schedule) -> dict[str, float]:
    """Each node's seconds by its subject, the median over the steps that were scheduled."""
    found: dict[str, list[float]] = defaultdict(list)
    for slot in schedule.slots:
        found[subject_of(slot.node.id)].append(slot.seconds)
    return {subject: median(seconds) for subject, seconds in found.items()}


def subject_of(node: str) -> str:
    """What a node does, whatever its step.

    >>> subject_of("reallocate.actor.vllm@3")
    'reallocate.actor.vllm'
    """
    return node.rpartition("@")[0]


def comparison_rows(rows: Iterable[Compared]) -> list[dict[str, str]]:
    """For a table."""
    return [
        {
            "call": row.subject,
            "predicted s": _number(row.predicted_seconds),
            "measured s": _number(row.measured_seconds),
            "with orchestration s": _number(row.wall_seconds),
            "ratio": _number(row.ratio),
        }
        for row in rows
    ]


def _compared(subject: str, spans: Sequence[Span], predicted: float | None) -> Compared:
    worked, held = median(span.seconds for span in spans), median(span.end - span.start for span in spans)
    return Compared(subject, len(spans), predicted, worked, held)


def _whole_step(predicted: Schedule, spans: Sequence[Span]) -> Compared:
    ends = _step_ends(spans)
    measured = steady_seconds(ends)
    return Compared(WHOLE_STEP, len(ends), predicted.seconds_per_step, measured, measured)


def _step_ends(spans: Sequence[Span]) -> list[float]:
    """When each step that trains ended, from the start of the first node: as a schedule counts them."""
    begin = min(span.start for span in spans)
    trained = {span.step for span in spans if span.kind == "train_step"}
    ends: Mapping[int, float] = {
        step: max(span.end for span in spans if span.step == step) - begin for step in sorted(trained)
    }
    return list(ends.values())


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
