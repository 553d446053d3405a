"""A scheduling rule as a value that a search is given: when a plan's nodes start, and what bounds their times.

Compiled code is specific to the rule. It calls the rule's compiled functions through `Tables.rule`, so a search never
compiles a rule that it was not given.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

from prefect_rlhf.placement.search.problem import Problem
from prefect_rlhf.placement.search.record import Record


class Rule(Record):
    """A rule's data about a problem, and memory for its results. Each subclass is a rule: `search(..., rule=RunOrder)`.

    Its compiled functions get the record itself first, then the tables.

    `schedule(rule, t, option, relation, us, overlap)` returns a plan's time by the rule, in microseconds. `bound(rule,
    t, option, relation, us, overlap, s, enough)` returns microseconds that no completion of a plan is below. It stops
    at the first term that reaches `enough`. `s.conflict` and `s.area` are filled; it writes `s.binding`.
    `least_in_any_order(bound, us)` returns how long a plan with this bound and this time may take if the rule allows
    another order of its nodes.
    """

    __slots__ = ()
    schedule: ClassVar[Callable[..., int]]
    bound: ClassVar[Callable[..., int]]
    least_in_any_order: ClassVar[Callable[..., int]]

    @classmethod
    @abstractmethod
    def of(cls, problem: Problem, iterations: int) -> Self:
        """Return the rule for a problem. Raises InvalidInput for a problem that the rule does not support."""
