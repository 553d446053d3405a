"""Describes how a run deviates from its prediction: by how much, and which node causes most of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from prefect_rlhf.placement.schedule.estimate import Prediction
from prefect_rlhf.tasks.reporting.comparison import NodeComparison, compare, step_ends
from prefect_rlhf.tasks.running.journal import TaskRunSpan

STEPS = 3  # in a row, before a deviation is reported: another program may cause a single deviation
STEPS_COMPARED = STEPS + 1  # the first step only gives the start of the next step
LEAST_SHARE = 0.1  # of the predicted seconds of a step


@dataclass(frozen=True, slots=True)
class Deviation:
    """A step's measured and predicted time, and the node that causes most of the difference."""

    step_seconds: float
    predicted_seconds: float
    node: NodeComparison

    def __str__(self) -> str:
        share = self.step_seconds / self.predicted_seconds - 1
        return (
            f"steps take {self.step_seconds:.3g} s, {abs(share):.0%} {'more' if share > 0 else 'less'} than predicted, "
            f"most of it in {self.node.subject}"
        )


def deviation(predicted: Prediction, spans: Sequence[TaskRunSpan]) -> Deviation | None:
    """Return how the last three steps deviate from their prediction; None if they are close to it.

    They deviate if each takes over 10% more than predicted, or each over 10% less. `spans` are the task runs of the
    last `STEPS_COMPARED` steps.
    """
    ends = step_ends(spans) if spans else []
    seconds = [later - earlier for earlier, later in pairwise(ends)][-STEPS:]
    shares = [value / predicted.seconds_per_step - 1 for value in seconds]
    longer, shorter = all(share > LEAST_SHARE for share in shares), all(share < -LEAST_SHARE for share in shares)
    if len(seconds) < STEPS or not (longer or shorter):
        return None
    rows = [row for row in compare(predicted, spans)[:-1] if row.predicted_seconds is not None]
    node = max(rows, key=lambda row: _excess(row) if longer else -_excess(row), default=None)
    return Deviation(median(seconds), predicted.seconds_per_step, node) if node is not None else None


def _excess(row: NodeComparison) -> float:
    """How many seconds a node takes in a step beyond its prediction."""
    return (row.measured_seconds - (row.predicted_seconds or 0.0)) * row.num_runs
