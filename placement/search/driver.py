"""The one loop that runs a search: budget, interrupt, progress, and what was found as a value."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.search.compiled import is_compiled
from prefect_rlhf.placement.search.exact.binding import binding_term
from prefect_rlhf.placement.search.exact.exact import IterativeDeepening
from prefect_rlhf.placement.search.partial.complete import evaluate
from prefect_rlhf.placement.search.partial.incumbent import Incumbent, SearchOutcome
from prefect_rlhf.placement.search.problem import Choice, Problem
from prefect_rlhf.placement.search.sampling.metropolis import MetropolisHastings
from prefect_rlhf.placement.search.tables.tables import Tables, build_tables, num_waits

Method = Literal["exact", "metropolis-hastings"]
PROGRESS_EVERY_SECONDS = 0.25
MICROSECOND = 1e-6
LOGGER = logging.getLogger(__name__)


class State(Protocol):
    """What the driver reads of a search's state."""

    @property
    def incumbent(self) -> Incumbent | None: ...
    @property
    def lower_bound_us(self) -> int: ...
    @property
    def evaluations(self) -> int: ...


class Search(Protocol):
    """A search: `step` does some milliseconds of work, `terminate` says when there is nothing left to do."""

    def init(self, t: Tables) -> Any: ...
    def step(self, t: Tables, state: Any) -> Any: ...
    def terminate(self, t: Tables, state: Any) -> SearchOutcome | None: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """What is known at a moment. `makespan_seconds` is None as long as no plan is known."""

    elapsed_seconds: float
    makespan_seconds: float | None
    lower_bound_seconds: float
    evaluations: int

    def __str__(self) -> str:
        if self.makespan_seconds is None:
            return f"{self.elapsed_seconds:5.1f} s: no plan yet, none below {self.lower_bound_seconds:.3f} s"
        gap = self.makespan_seconds / self.lower_bound_seconds - 1
        return (
            f"{self.elapsed_seconds:5.1f} s: {self.makespan_seconds:.3f} s, none below {self.lower_bound_seconds:.3f} s"
            f" (gap {gap:.2%}), {self.evaluations:,} evaluations"
        )


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan and how good it can be at most. `plan` is None, and times infinite, when none was found.

    `period_seconds` is what one more iteration takes once the pipeline is full. No plan of the whole space has a
    makespan below `lower_bound_seconds`. `binding` says in words what keeps the plan from being faster.
    """

    outcome: SearchOutcome
    plan: dict[str, Choice] | None
    makespan_seconds: float
    period_seconds: float
    lower_bound_seconds: float
    binding: str
    evaluations: int
    cpu_seconds: float

    @property
    def gap(self) -> float:
        """By how much of the lower bound the plan is above it."""
        return self.makespan_seconds / self.lower_bound_seconds - 1

    @property
    def proved_optimal(self) -> bool:
        return self.outcome is SearchOutcome.OPTIMAL


def search(
    problem: Problem,
    budget_seconds: float,
    method: Method = "exact",
    seed: int = 0,
    max_gap: float = 0.0,
    max_evaluations: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> SearchResult:
    """The best plan found in `budget_seconds` of processor time, and a lower bound on any.

    Ends early when the plan is proved optimal, when its gap is at most `max_gap`, after about `max_evaluations`, when
    `should_stop` says so, or on KeyboardInterrupt: each time with what is known by then. The same problem, seed and
    number of evaluations give the same plan. Raises InvalidInput for a budget that is not positive.
    """
    if not budget_seconds > 0:
        raise InvalidInput("budget_seconds", budget_seconds, "more than 0 seconds")
    tables = build_tables(problem)
    solver = _solver(method, seed, max_gap)
    warm_up(tables)
    limits = _Limits(budget_seconds, max_evaluations, progress, should_stop)
    outcome, state, cpu_seconds = _run(solver, tables, limits)
    return _result(problem, tables, state, outcome, cpu_seconds)


def warm_up(t: Tables) -> None:
    """Load the compiled part, or compile it, so that this does not count as search."""
    if not is_compiled():
        LOGGER.warning("Compiling the search, which takes about two minutes and is kept for the next time.")
    once = t._replace(iterations=1)
    for solver in (_solver("exact", 0, 0.0), _solver("metropolis-hastings", 0, 0.0)):
        solver.step(once, solver.step(once, solver.init(once)))


def _solver(method: Method, seed: int, max_gap: float) -> Search:
    if method == "exact":
        return IterativeDeepening(seed, max_gap)
    if method == "metropolis-hastings":
        return MetropolisHastings(seed)
    raise InvalidInput("method", method, "exact or metropolis-hastings")


@dataclass(frozen=True, slots=True)
class _Limits:
    budget_seconds: float
    max_evaluations: int | None
    progress: Callable[[Progress], None] | None
    should_stop: Callable[[], bool] | None

    def reached(self, state: State, elapsed_seconds: float) -> SearchOutcome | None:
        if self.should_stop is not None and self.should_stop():
            return SearchOutcome.INTERRUPTED
        spent = self.max_evaluations is not None and state.evaluations >= self.max_evaluations
        return SearchOutcome.OUT_OF_BUDGET if spent or elapsed_seconds >= self.budget_seconds else None


def _run(solver: Search, tables: Tables, limits: _Limits) -> tuple[SearchOutcome, State, float]:
    began = time.process_time()
    state = solver.init(tables)
    shown = 0.0
    outcome = None
    try:
        while outcome is None:
            state = solver.step(tables, state)
            elapsed = time.process_time() - began
            outcome = solver.terminate(tables, state) or limits.reached(state, elapsed)
            if limits.progress is not None and (outcome or elapsed >= shown):
                limits.progress(_progress(state, elapsed))
                shown = elapsed + PROGRESS_EVERY_SECONDS
    except KeyboardInterrupt:
        outcome = SearchOutcome.INTERRUPTED
    return outcome, state, time.process_time() - began


def _progress(state: State, elapsed_seconds: float) -> Progress:
    makespan = None if state.incumbent is None else state.incumbent.makespan_us * MICROSECOND
    return Progress(elapsed_seconds, makespan, state.lower_bound_us * MICROSECOND, state.evaluations)


def _result(problem: Problem, tables: Tables, state: State, outcome: SearchOutcome, cpu_seconds: float) -> SearchResult:
    best = state.incumbent
    makespan_us = float("inf") if best is None else best.makespan_us
    return SearchResult(
        outcome=outcome,
        plan=None if best is None else _plan(problem, best),
        makespan_seconds=makespan_us * MICROSECOND,
        period_seconds=float("inf") if best is None else _period(problem, tables, best),
        lower_bound_seconds=min(makespan_us, state.lower_bound_us) * MICROSECOND,
        binding=binding_term(problem, tables, best),
        evaluations=state.evaluations,
        cpu_seconds=cpu_seconds,
    )


def _plan(problem: Problem, best: Incumbent) -> dict[str, Choice]:
    chosen = zip(problem.calls, best.options, best.meshes, strict=True)
    return {call.name: Choice(option, mesh) for call, option, mesh in chosen}


def _period(problem: Problem, t: Tables, best: Incumbent) -> float:
    """Seconds per iteration once the pipeline is full: what the second half of many iterations takes."""
    half = 4 * problem.iterations
    first, both = (_makespan(problem, t, best, iterations) for iterations in (half, 2 * half))
    return (both - first) * MICROSECOND / half


def _makespan(problem: Problem, t: Tables, best: Incumbent, iterations: int) -> int:
    longer = t._replace(iterations=iterations, num_waits=num_waits(problem, iterations))
    return int(evaluate(longer, best.placed(longer)))
