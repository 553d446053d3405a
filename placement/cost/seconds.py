"""A call's time as a value with named terms."""

from __future__ import annotations

from operator import add
from typing import NamedTuple

_made = tuple.__new__  # without the arguments' names, which take most of the time of a sum


class Seconds(NamedTuple):
    """Seconds by cause. docs/internals/cost_model.md explains each term and has the source of its formula.

    A named tuple, because a search adds up millions of them, and a dataclass takes twice as long to make.

    >>> (Seconds(compute=2.0) + Seconds(launch=1.0).times(3)).total
    5.0
    """

    compute: float = 0.0
    memory_traffic: float = 0.0
    launch: float = 0.0
    tp_communication: float = 0.0
    pp_communication: float = 0.0
    ep_communication: float = 0.0
    pipeline_bubble: float = 0.0
    dp_communication: float = 0.0
    optimizer: float = 0.0
    environment: float = 0.0
    call: float = 0.0
    transfer: float = 0.0
    orchestration: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)

    def __add__(self, other: Seconds) -> Seconds:  # type: ignore[override]  # adds terms; a tuple would be longer
        return _made(Seconds, map(add, self, other))

    def times(self, factor: float) -> Seconds:
        """Return each term multiplied by `factor`."""
        return _made(Seconds, [factor * term for term in self])

    @property
    def worked(self) -> float:
        """The seconds that ranks work, by their own clocks; excludes orchestration."""
        return self._replace(orchestration=0.0).total

    def by_term(self) -> dict[str, float]:
        """Return the terms that are not zero, the longest first."""
        named = zip(self._fields, self, strict=True)
        return dict(sorted(((name, value) for name, value in named if value), key=lambda item: -item[1]))
