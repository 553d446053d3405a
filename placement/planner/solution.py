"""The plan of a question that a search of one of its problems finds."""

from __future__ import annotations

from collections.abc import Sequence

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.plan_problem import PlanProblem
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.search.driver import Method, SearchResult, search


def solution(
    question: Question, problem: PlanProblem, result: SearchResult, name: str = "auto"
) -> ExecutionPlan | None:
    """Return the plan that a search found, as it would run; None where it found none."""
    return None if result.plan is None else question.plan(name, problem.placements(result.plan))


def solve_fitting(
    question: Question,
    problem: PlanProblem,
    budget_seconds: float,
    method: Method = "exact",
    name: str = "auto",
    shares: Sequence[float] = (1.0,),
) -> ExecutionPlan | None:
    """Search a problem in ever smaller shares of the memory until its plan fits; None where it never does."""
    for share in shares:
        result = search(problem.with_memory(share).problem, budget_seconds / len(shares), method)
        plan = solution(question, problem, result, name)
        if plan is not None and question.fits(plan):
            return plan
    return None
