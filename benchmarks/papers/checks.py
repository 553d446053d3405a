"""A comparison with a paper: rows of a table, and orders that the paper reports, each held or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Check:
    """`expected` is the paper's order in words, `values` what decides it here."""

    name: str
    expected: str
    values: Mapping[str, float | str | None]
    holds: bool

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.name}: {self.expected}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure or table of a paper."""

    title: str
    rows: Sequence[Row]
    checks: Sequence[Check]


def format_seconds(seconds: float | None) -> str:
    """Write seconds for a table; a dash where nothing fits."""
    return "-" if seconds is None else f"{seconds:.1f}"
