"""Predicted and measured times side by side: for each node, the step, and the controller's overhead."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from prefect_rlhf.placement.augmented.node import BEHIND, subject_of
from prefect_rlhf.placement.schedule.estimate import Prediction
from prefect_rlhf.placement.schedule.schedule import steady_seconds
from prefect_rlhf.tasks.running.journal import TaskRunSpan

WHOLE_STEP = "step"
ORCHESTRATION = "orchestration of a task run"


@dataclass(frozen=True, slots=True)
class NodeComparison:
    """A node of every step, or the whole step."""

    subject: str
    num_runs: int
    predicted_seconds: float | None
    """None if no source of times covers the node."""
    measured_seconds: float
    """Its slowest rank's working time, as a median over steps."""
    wall_seconds: float
    """The median time it held its devices, including orchestration."""

    @property
    def ratio(self) -> float | None:
        """Predicted over measured seconds; None if either is missing or 0."""
        if not self.predicted_seconds or not self.measured_seconds:
            return None
        return self.predicted_seconds / self.measured_seconds


def compare(predicted: Prediction, spans: Sequence[TaskRunSpan]) -> list[NodeComparison]:
    """Return a row for each node of a step in order of start, then orchestration, then the steady step.

    The first step is left out if other steps train too, because it builds and compiles objects that later steps reuse.
    """
    if not spans:
        return []
    trained = sorted({span.step for span in spans if span.kind == "train_step"})
    later = [span for span in spans if span.step > trained[0]] if len(trained) > 1 else list(spans)
    runs: dict[str, list[TaskRunSpan]] = defaultdict(list)
    for span in sorted(later, key=lambda span: span.start):
        runs[subject_of(span.node)].append(span)
    rows = []
    for subject, of_subject in runs.items():
        worked = median(span.seconds for span in of_subject)
        wall = median(span.end - span.start for span in of_subject)
        rows.append(NodeComparison(subject, len(of_subject), predicted.seconds_by_subject.get(subject), worked, wall))
    added = orchestration_seconds(later)
    ends = step_ends(spans)
    step = steady_seconds(ends)
    return [
        *rows,
        NodeComparison(ORCHESTRATION, len(later), predicted.orchestration_seconds, added, added),
        NodeComparison(WHOLE_STEP, len(ends), predicted.seconds_per_step, step, step),
    ]


def orchestration_seconds(spans: Sequence[TaskRunSpan]) -> float:
    """Return the controller's median overhead per task run: from the end of the last obstacle, without the work itself.

    A node's obstacles are the nodes that it depends on and the nodes that held its devices before.
    """
    ended = {span.node: span.end for span in spans}
    freed: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        for device in span.devices:
            freed[device].append(span.end)
    added = []
    for span in spans:
        awaited = [ended[node] for node in span.depends_on if node in ended]
        before = [end for device in span.devices for end in freed[device] if end <= span.start]
        if awaited:
            added.append(max(0.0, span.end - max(awaited + before) - span.seconds))
    return median(added) if added else 0.0


def step_ends(spans: Sequence[TaskRunSpan]) -> list[float]:
    """Return when each training step ended, in seconds from the start of the first node, as in a schedule."""
    spans = [span for span in spans if span.kind not in BEHIND]
    begin = min(span.start for span in spans)
    trained = {span.step for span in spans if span.kind == "train_step"}
    return [max(span.end for span in spans if span.step == step) - begin for step in sorted(trained)]


def comparison_rows(rows: Iterable[NodeComparison]) -> list[dict[str, str]]:
    """Return the rows of a table; it ranks nodes by predicted and by measured time."""
    rows = list(rows)
    nodes = [
        row for row in rows if row.subject not in (WHOLE_STEP, ORCHESTRATION) and row.predicted_seconds is not None
    ]
    predicted = ranking({row.subject: row.predicted_seconds or 0.0 for row in nodes})
    measured = ranking({row.subject: row.measured_seconds for row in nodes})
    return [
        {
            "node": row.subject,
            "predicted s": format_seconds(row.predicted_seconds),
            "measured s": format_seconds(row.measured_seconds),
            "ratio": format_seconds(row.ratio),
            "with orchestration s": format_seconds(row.wall_seconds),
            "predicted order": str(predicted.get(row.subject, "")),
            "measured order": str(measured.get(row.subject, "")),
        }
        for row in rows
    ]


def ranking(seconds: Mapping[str, float], longest_first: bool = True) -> dict[str, int]:
    """Return each subject's place, from 1.

    >>> ranking({"a": 1.0, "b": 3.0, "c": 2.0})
    {'b': 1, 'c': 2, 'a': 3}
    """
    ranked = sorted(seconds, key=seconds.__getitem__, reverse=longest_first)
    return {subject: place for place, subject in enumerate(ranked, start=1)}


def format_seconds(value: float | None) -> str:
    """Format with three digits; empty for None."""
    return "" if value is None else f"{value:.3g}"
