"""A rule of scheduling as a value that a search is given: when the nodes of a plan start, and what bounds their times.

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
    """What a rule knows of a problem, and room for its results. A subclass is a rule; `search(..., rule=RunOrder)`.

    Its compiled functions get the record itself first, then the tables.

    `schedule(rule, t, option, relation, us, overlap)` returns the microseconds of a plan: what counts by the rule.
    `bound(rule, t, option, relation, us, s, enough)` returns microseconds that no completion of a plan is below. It
    stops at the first of its terms to reach `enough`. `s.conflict` and `s.area` are filled; it writes `s.binding`.
    `least_in_any_order(bound, us)` returns what a plan with this bound and these microseconds may take if the rule
    allows another order of its nodes.
    """

    __slots__ = ()
    schedule: ClassVar[Callable[..., int]]
    bound: ClassVar[Callable[..., int]]
    least_in_any_order: ClassVar[Callable[..., int]]

    @classmethod
    @abstractmethod
    def of(cls, problem: Problem, iterations: int) -> Self:
        """Return the rule for a problem. Raises InvalidInput for what the rule does not know."""
