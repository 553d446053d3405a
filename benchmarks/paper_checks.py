"""What a comparison with a paper says: rows of a table, and orders that the paper reports, each held or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

Row = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Check:
    """`expected` is the paper's order in words, `values` what decides it here."""

    name: str
    expected: str
    values: Mapping[str, float | str | None]
    holds: bool

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'DOES NOT HOLD'}: {self.name}: {self.expected}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure or table of a paper."""

    title: str
    rows: Sequence[Row]
    checks: Sequence[Check]


def grows(values: Sequence[float]) -> bool:
    """Whether each is above the one before.

    >>> grows([1.0, 2.0, 3.0]), grows([1.0, 1.0])
    (True, False)
    """
    return all(before < after for before, after in zip(values, values[1:], strict=False))


def shown(seconds: float | None) -> str:
    """For a table; a dash where nothing fits."""
    return "-" if seconds is None else f"{seconds:.1f}"
