"""The report of a morning: each finding beside its expectation, and the replacement of each constant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.findings import shown
from benchmarks.gpu.run import Outcome
from benchmarks.gpu.step import Step


def report(steps: Sequence[Step], outcomes: Sequence[Outcome], pretend: bool) -> Iterator[str]:
    """Yield the lines of the report."""
    yield "Steps (a range says whether it was seen on a card or comes from reading)"
    for step, outcome in zip(steps, outcomes, strict=True):
        yield f"  {step.name} [{step.findings}]: {outcome.status}, {outcome.seconds:g} s {outcome.reason}".rstrip()
        found = outcome.found or {}
        for key, value in found.items():
            wanted = f"; expected {step.expects[key]}" if key in step.expects else ""
            yield f"    {'DIFFERS ' if key in outcome.differs else ''}{key} = {shown(value)}{wanted}"
        missing = {key: range_ for key, range_ in step.expects.items() if key not in found}
        yield from (f"    {key}: not measured; expected {range_}" for key, range_ in missing.items())
    yield "Constants"
    for row in constants(steps, outcomes):
        now = "not measured" if row["replacement"] is None or pretend else f"{row['replacement']:g}"
        yield f"  {row['name']} ({row['file']}): {row['present']:g} -> {now}"


def constants(steps: Sequence[Step], outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return each constant with its replacement, or with None if its step has not found it."""
    return [
        {
            "name": constant.name,
            "file": constant.file,
            "present": constant.present,
            "replacement": (outcome.found or {}).get(constant.found),
        }
        for step, outcome in zip(steps, outcomes, strict=True)
        for constant in step.constants
    ]


def summary(steps: Sequence[Step], outcomes: Sequence[Outcome], pretend: bool) -> dict[str, Any]:
    """Return the last line of the report, as JSON values."""
    by_status: dict[str, int] = {}
    for outcome in outcomes:
        by_status[outcome.status] = by_status.get(outcome.status, 0) + 1
    return {
        "pretend": pretend,
        "steps": by_status,
        "differs": {outcome.step: list(outcome.differs) for outcome in outcomes if outcome.differs},
        "failed": {each.step: each.reason for each in outcomes if each.status in ("failed", "too slow")},
        "constants": [] if pretend else constants(steps, outcomes),
    }
