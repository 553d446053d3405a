"""The record of public runs: measured seconds over our estimate, and the range that follows for an answer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from prefect_rlhf.flows.hardware.runtimes import PUBLIC, with_runtime
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.question import Question

Kind = Literal["rollouts", "training"]


@dataclass(frozen=True, slots=True)
class Record:
    """How measured times of `runs` public runs compare to predicted ones: the lowest and the highest ratio."""

    least: float
    most: float
    runs: int


RECORD: Mapping[Kind, Record] = MappingProxyType({"rollouts": Record(0.91, 1.23, 8), "training": Record(0.92, 1.28, 7)})
"""By `python -m benchmarks.public_runs`, with the constants of the runtime `public`: steps with rollouts, and steps of
training alone. Half of the runs set two constants, the others none."""


@dataclass(frozen=True, slots=True)
class Range:
    """The step time, in seconds, to expect from public runs of this kind."""

    kind: Kind
    least: float
    most: float
    runs: int

    def __str__(self) -> str:
        return f"public runs of this kind: {_digits(self.least)} to {_digits(self.most)} s"


def public_range(question: Question, plan: ExecutionPlan) -> Range | None:
    """Return the range of a plan's step time. None on CPUs, with measured profiles, and with adapters, for which no
    public run is on record.

    The range is the estimate with the constants of public runs, times the ratios on record.
    """
    site = question.site
    if site.backend != "cuda" or site.sources.profiles or any(model.adapter for model in question.graph.models):
        return None
    seconds = replace(question, site=with_runtime(site, PUBLIC)).estimate(plan).seconds
    kind: Kind = (
        "rollouts" if any(call.kind == "generate" and call.every is None for call in question.graph) else "training"
    )
    record = RECORD[kind]
    return Range(kind, seconds * record.least, seconds * record.most, record.runs)


def _digits(seconds: float) -> str:
    """Return three digits, or all digits before the point.

    >>> _digits(0.01234), _digits(68.04), _digits(1234.5)
    ('0.0123', '68', '1234')
    """
    return f"{seconds:.0f}" if seconds >= 10 else f"{seconds:.3g}"
