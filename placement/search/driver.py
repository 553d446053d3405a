"""Runs a search: budget, interrupt, progress, and the result as a value."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, TypeVar

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.search.compiled import announce_compilation
from prefect_rlhf.placement.search.exact.binding import binding_term
from prefect_rlhf.placement.search.exact.exact import ExactState, IterativeDeepening
from prefect_rlhf.placement.search.method import Method
from prefect_rlhf.placement.search.partial.complete import INFINITE
from prefect_rlhf.placement.search.partial.incumbent import Incumbent, SearchOutcome
from prefect_rlhf.placement.search.problem import Choice, Interval, Option, PlannedCall, Problem
from prefect_rlhf.placement.search.rules.run_order import LEAST_ITERATIONS, RunOrder
from prefect_rlhf.placement.search.tables.rule import Rule
from prefect_rlhf.placement.search.tables.tables import Tables, build_tables

PROGRESS_EVERY_SECONDS = 0.25
MICROSECOND = 1e-6
SMALLEST = Problem(
    name="smallest",
    device_bytes=(1,),
    meshes=(Interval(0, 1, "0"),),
    mesh_classes=((0,),),
    nodes=tuple(
        PlannedCall(name, None, "inference", (Option(Strategy(), 0, 1, 0, 0),)) for name in ("first", "second")
    ),
    edges=(),
    iterations=LEAST_ITERATIONS,
)
"""A problem of two calls: with a single call, a search would not use every compiled function."""


class State(Protocol):
    """The part of a search's state that the driver reads."""

    @property
    def incumbent(self) -> Incumbent | None: ...
    @property
    def lower_bound_us(self) -> int: ...
    @property
    def evaluations(self) -> int: ...


_State = TypeVar("_State", bound=State)


class Search(Protocol):
    """A search: `step` does some milliseconds of work; `terminate` returns an outcome if no work is left."""

    def init(self, t: Tables) -> Any: ...
    def step(self, t: Tables, state: Any) -> Any: ...
    def terminate(self, t: Tables, state: Any) -> SearchOutcome | None: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """Makespan and bound at a moment of a search. `seconds` is None until a plan is known."""

    elapsed_seconds: float
    seconds: float | None
    lower_bound_seconds: float
    evaluations: int

    def __str__(self) -> str:
        if self.seconds is None:
            return (
                f"searching for {self.elapsed_seconds:.1f} s: no plan yet; no plan takes less than the lower bound of "
                f"{self.lower_bound_seconds:.4g} s a step"
            )
        return (
            f"searching for {self.elapsed_seconds:.1f} s: the best plan so far takes {self.seconds:.4g} s a step; none "
            f"takes less than the lower bound of {self.lower_bound_seconds:.4g} s"
        )


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best plan and a bound on every plan."""

    outcome: SearchOutcome
    plan: dict[str, Choice] | None
    """None, and times infinite, if no plan was found."""
    seconds: float
    """The time by the rule, such as the iteration time of a long run."""
    lower_bound_seconds: float
    """No plan of the whole space takes less, in any order of its nodes that the rule allows."""
    binding: str
    """The term of the bound that keeps the plan from being faster."""
    evaluations: int
    cpu_seconds: float

    @property
    def gap(self) -> float:
        """How much longer the plan takes than the lower bound, as a share of the bound."""
        return self.seconds / self.lower_bound_seconds - 1

    @property
    def proved_optimal(self) -> bool:
        return self.outcome is SearchOutcome.OPTIMAL


@dataclass(frozen=True, slots=True)
class Proof:
    """A bound that no plan is below, and how far a search can raise it."""

    lower_bound_seconds: float
    """No plan takes less."""
    provable_seconds: float
    """The most that more evaluations prove."""
    binding: str
    """The binding term of the bound, in words."""
    plan: dict[str, Choice] | None = None
    """The visited plan with the lowest bound; None if all are left out."""
    reached: tuple[Tables, ExactState] | None = field(default=None, repr=False, compare=False)
    """Where a further proof can continue."""


def search(
    problem: Problem,
    budget_seconds: float = math.inf,
    method: Method = "exact",
    seed: int = 0,
    max_gap: float = 0.0,
    max_evaluations: float = math.inf,
    progress: Callable[[Progress], None] | None = None,
    enough_seconds: float = math.inf,
    rule: type[Rule] = RunOrder,
) -> SearchResult:
    """Search for the best plan, and for a lower bound on any plan, until a budget is spent.

    The budget is `budget_seconds` of processor time, or about `max_evaluations`. The search ends early if the plan is
    proved optimal, if its gap is at most `max_gap`, if the bound reaches `enough_seconds`, or on KeyboardInterrupt,
    with the best results so far. The same problem, seed and number of evaluations give the same plan. The `rule`
    determines a plan's time; by default it is the order of a run. Raises InvalidInput for a budget that is not
    positive.
    """
    if not budget_seconds > 0:
        raise InvalidInput("budget_seconds", budget_seconds, "more than 0 seconds")
    tables = build_tables(problem, rule)
    solver = _solver(method, seed, max_gap)
    warm_up(method, rule)
    begun = solver.init(tables)
    outcome, state, cpu_seconds = _run(solver, tables, begun, budget_seconds, max_evaluations, progress, enough_seconds)
    return _result(problem, tables, state, outcome, cpu_seconds)


def prove(
    problem: Problem,
    most_seconds: float,
    budget_seconds: float = math.inf,
    max_evaluations: float = math.inf,
    enough_seconds: float = math.inf,
    earlier: Proof | None = None,
    rule: type[Rule] = RunOrder,
) -> Proof:
    """Prove a bound of at most `most_seconds` on every plan, in any order of its nodes that the rule allows.

    It does not look for plans; a plan's bound counts as its time. So it ends when no plan is below the lowest bound of
    a visited plan, and no further evaluation raises it. The other parameters are as in `search`. It continues an
    `earlier` proof of the same problem with more seconds, and counts its evaluations. Raises InvalidInput for a budget
    that is not positive.
    """
    if not budget_seconds > 0:
        raise InvalidInput("budget_seconds", budget_seconds, "more than 0 seconds")
    warm_up(rule=rule)
    most_us = whole_microseconds(most_seconds)
    solver = IterativeDeepening(improving_share=0.0, bounds_only=True, most_us=most_us)
    if earlier is None or earlier.reached is None:
        tables = build_tables(problem, rule)
        state = solver.init(tables)
    else:
        tables, state = earlier.reached[0], solver.again(earlier.reached[1])
    if earlier is None or solver.terminate(tables, state) is None:
        _, state, _ = _run(solver, tables, state, budget_seconds, max_evaluations, None, enough_seconds)
    least_us = most_us if state.incumbent is None else state.incumbent.makespan_us
    binding = binding_term(problem, tables, state.incumbent)
    lower_us, plan = min(most_us, state.lower_bound_us), _plan(problem, state.incumbent)
    return Proof(lower_us * MICROSECOND, least_us * MICROSECOND, binding, plan, (tables, state))


def whole_microseconds(seconds: float) -> int:
    """Return `seconds` in whole microseconds, rounded down; `INFINITE` for infinite seconds."""
    return INFINITE if seconds == math.inf else math.floor(seconds / MICROSECOND)


def warm_up(method: Method = "exact", rule: type[Rule] = RunOrder) -> None:
    """Load or compile all functions that a method needs with a rule, once per process, so that no budget pays for
    it.
    """
    key: Any = rule  # a class can be hashed, which mypy does not see
    _warm_up(method, key)


@cache
def _warm_up(method: Method, rule: type[Rule]) -> None:
    announce_compilation()
    tables = build_tables(SMALLEST, rule)
    solver = _solver(method, 0, 0.0)
    state = solver.step(tables, solver.step(tables, solver.init(tables)))
    _result(SMALLEST, tables, state, SearchOutcome.OUT_OF_BUDGET, 0.0)


def _solver(method: Method, seed: int, max_gap: float) -> Search:
    if method == "exact":
        return IterativeDeepening(seed, max_gap)
    if method == "metropolis-hastings":
        from prefect_rlhf.placement.search.sampling.metropolis import (
            MetropolisHastings,  # imported here: few ask for it
        )

        return MetropolisHastings(seed)
    raise InvalidInput("method", method, "exact or metropolis-hastings")


def _run(
    solver: Search,
    tables: Tables,
    state: _State,
    budget_seconds: float,
    max_evaluations: float,
    progress: Callable[[Progress], None] | None,
    enough_seconds: float,
) -> tuple[SearchOutcome, _State, float]:
    began = time.process_time()
    next_report = 0.0
    outcome = None
    try:
        while outcome is None:
            state = solver.step(tables, state)
            elapsed = time.process_time() - began
            outcome = solver.terminate(tables, state)
            if outcome is None and state.lower_bound_us * MICROSECOND >= enough_seconds:
                outcome = SearchOutcome.ENOUGH
            if outcome is None and (elapsed >= budget_seconds or state.evaluations >= max_evaluations):
                outcome = SearchOutcome.OUT_OF_BUDGET
            if progress is not None and (outcome or elapsed >= next_report):
                makespan = None if state.incumbent is None else state.incumbent.makespan_us * MICROSECOND
                progress(Progress(elapsed, makespan, state.lower_bound_us * MICROSECOND, state.evaluations))
                next_report = elapsed + PROGRESS_EVERY_SECONDS
    except KeyboardInterrupt:
        outcome = SearchOutcome.INTERRUPTED
    return outcome, state, time.process_time() - began


def _result(problem: Problem, tables: Tables, state: State, outcome: SearchOutcome, cpu_seconds: float) -> SearchResult:
    best = state.incumbent
    makespan_us = math.inf if best is None else best.makespan_us
    return SearchResult(
        outcome=outcome,
        plan=_plan(problem, best),
        seconds=makespan_us * MICROSECOND,
        lower_bound_seconds=min(makespan_us, state.lower_bound_us) * MICROSECOND,
        binding=binding_term(problem, tables, best),
        evaluations=state.evaluations,
        cpu_seconds=cpu_seconds,
    )


def _plan(problem: Problem, best: Incumbent | None) -> dict[str, Choice] | None:
    if best is None:
        return None
    chosen = zip(problem.calls, best.options, best.meshes, strict=True)
    return {call.name: Choice(option, mesh) for call, option, mesh in chosen}
