"""The pool of plans that fit, with their times, and the passes that improve it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.attempts import Finding, SearchRequest
from prefect_rlhf.placement.planner.planned import differently_placed
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.search.budget import Budget

Timed = tuple[ExecutionPlan, float]


@dataclass(frozen=True, slots=True)
class Refinement:
    """A small change that is tried on each kept plan, such as fewer micro-batches; it never makes the plan slower."""

    name: str
    refine: Callable[[Question, ExecutionPlan, PlanSpace], ExecutionPlan]


@dataclass(frozen=True, slots=True)
class Pool:
    """Everything known about a request's plans."""

    request: SearchRequest
    findings: tuple[Finding, ...]
    timed: tuple[Timed, ...]
    """Plans that fit, with their seconds."""
    at_most: float
    """The answer takes at most so many seconds: the time of the fastest plan known without a search of the whole
    space."""
    refinements: tuple[Refinement, ...]
    budget: Budget
    """For each local search."""
    fastest: ExecutionPlan
    """The fastest plan so far."""
    chosen: ExecutionPlan | None = None
    """A plan preferred to it."""
    improved: tuple[ExecutionPlan, ...] = ()
    """The plans that the local search started from."""
    rivals: tuple[ExecutionPlan, ...] = ()
    """Plans with which the answer is compared under wrong constants; without any, it is not."""

    @classmethod
    def of(
        cls,
        request: SearchRequest,
        findings: Iterable[Finding],
        known: Iterable[ExecutionPlan],
        refinements: tuple[Refinement, ...],
        budget: Budget,
    ) -> Pool | None:
        """Return the pool of all plans found and of the plans `known` before; None if there is no plan."""
        question, findings = request.question, tuple(findings)
        presets = [preset for finding in findings for preset in finding.presets]
        compared = [(plan, question.seconds(plan)) for plan in known]
        compared += [(preset.plan, preset.estimate.seconds) for preset in presets if preset.plan and preset.estimate]
        compared += [(plan, question.seconds(plan)) for finding in findings for plan in finding.admitted]
        timed = [(plan, question.seconds(plan)) for finding in findings for plan in finding.plans] + compared
        if not timed:
            return None
        at_most = min((seconds for _, seconds in compared), default=math.inf)
        return cls(request, findings, tuple(timed), at_most, refinements, budget, differently_placed(timed)[0])

    @property
    def question(self) -> Question:
        return self.request.question

    @property
    def answer(self) -> ExecutionPlan:
        return self.fastest if self.chosen is None else self.chosen

    def with_fastest(self, plans: Iterable[ExecutionPlan]) -> Pool:
        """Return the pool with the fastest of these plans and its own."""
        return replace(self, fastest=min([self.fastest, *plans], key=self.question.seconds))

    def refined(self, plan: ExecutionPlan) -> ExecutionPlan:
        """Return the plan with all refinements applied."""
        for each in self.refinements:
            plan = each.refine(self.question, plan, self.request.space)
        return plan


@dataclass(frozen=True, slots=True)
class Pass:
    """A step of the planner: `improve` returns a better pool, if the pass `applies`."""

    name: str
    improve: Callable[[Pool], Pool]
    applies: Callable[[Pool], bool] = lambda pool: True
