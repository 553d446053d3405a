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
    """Everything known about a request's plans.

    `timed` are plans that fit, with their seconds. The answer takes at most `at_most` seconds, the time of the fastest
    plan known without a search of the whole space. `budget` is for each local search. `fastest` is the fastest plan so
    far, `chosen` a plan preferred to it.

    `improved` are the plans that the local search started from. The answer is compared with its `rivals` under wrong
    constants; without rivals this comparison is left out.
    """

    request: SearchRequest
    findings: tuple[Finding, ...]
    timed: tuple[Timed, ...]
    at_most: float
    refinements: tuple[Refinement, ...]
    budget: Budget
    fastest: ExecutionPlan
    chosen: ExecutionPlan | None = None
    improved: tuple[ExecutionPlan, ...] = ()
    rivals: tuple[ExecutionPlan, ...] = ()

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
