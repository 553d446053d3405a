"""The exact search: iterative deepening proves bounds, annealing finds plans, and each prunes the other.

A plan found by annealing lowers the threshold of the current round. A finished round raises the lower bound to the
lowest bound that it left out, and the next threshold is a little above that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from prefect_rlhf.placement.search.exact.deepening import advance, begin, best_plan, decision_order, lower
from prefect_rlhf.placement.search.exact.neighbourhood import Neighbourhoods, step_neighbourhood
from prefect_rlhf.placement.search.exact.search_state import (
    BEST,
    BOUNDS_ONLY,
    EVALUATIONS,
    LEAST_BOUND,
    LEAST_LEFT,
    SearchState,
    empty_search_state,
)
from prefect_rlhf.placement.search.partial.complete import INFINITE
from prefect_rlhf.placement.search.partial.incumbent import Incumbent, SearchOutcome
from prefect_rlhf.placement.search.partial.partial import bound_partial, empty_partial
from prefect_rlhf.placement.search.sampling.annealing import AnnealingState, begin_annealing, step_annealing
from prefect_rlhf.placement.search.tables.tables import Tables

EVALUATIONS_A_STEP = 5_000  # of deepening: some ten milliseconds
DEARER = 2.0  # intended ratio of the evaluations of a round to the round before
SMALL_ROUND = 1_000  # evaluations of a round of negligible cost
MOST_GROWTH = 0.02
LEAST_GROWTH = 1e-5
TOO_DEAR = 8.0  # times the evaluations of the round before: a round that takes more starts again with a lower threshold
TOO_LONG = 0.25  # of all evaluations before: as long a round may take in any case
STALE_AFTER = 3.0  # times the evaluations at which the search for plans last found a better plan
STALE_AFTER_LEAST = 1_000_000  # evaluations
STALE_SHARE = 0.2  # of its share is left to a search for plans that is stale


@dataclass(frozen=True, slots=True)
class ExactState:
    """The state of both searches."""

    search: SearchState
    """Its arrays are changed in place, as those of `annealing`."""
    annealing: AnnealingState
    proved_us: int
    """No plan takes less by the problem's rule."""
    lower_bound_us: int
    """No plan takes less in any order."""
    growth: float
    incumbent: Incumbent | None = None
    near: Neighbourhoods | None = None
    """None until a plan is found, and when all neighbourhoods of the best plan have been searched."""
    near_evaluations: int = 0
    improved_at: int = 0  # `improving_evaluations` when these last found a better plan
    ended: bool = False
    began_at: int = 0  # evaluations when the round under way began
    last_round: int = 0  # evaluations of the round before

    @property
    def proving_evaluations(self) -> int:
        """How many evaluations deepening used."""
        return int(self.search.tally[EVALUATIONS])

    @property
    def improving_evaluations(self) -> int:
        """How many evaluations were spent on finding plans, not on bounds."""
        return self.annealing.evaluations + self.near_evaluations

    @property
    def evaluations(self) -> int:
        """Bounds and schedules computed so far."""
        return self.proving_evaluations + self.improving_evaluations


@final
@dataclass(frozen=True, slots=True)
class IterativeDeepening:
    """Alternates rounds of deepening, which prove bounds, with steps of a search that finds plans."""

    seed: int = 0
    max_gap: float = 0.0
    growth: float = 0.0015
    """How much the threshold first rises, as a share; later rises aim at rounds that cost twice as much as the last."""
    improving_share: float = 0.5
    """Evaluations of the search for plans per evaluation of deepening, until it stops improving."""
    bounds_only: bool = False
    """A plan counts as fast as its bound: the search ends when no plan is below the least bound of a visited plan,
    which no more evaluations can raise."""
    most_us: int = INFINITE
    """Plans that take so long or longer are left out."""

    def init(self, t: Tables) -> ExactState:
        lower_bound = int(bound_partial(t, empty_partial(t), INFINITE))
        search = empty_search_state(t, decision_order(t, self.bounds_only))
        search.scalars[BOUNDS_ONLY] = self.bounds_only
        lower(search, self.most_us)
        return _next_round(t, ExactState(search, begin_annealing(t, self.seed), lower_bound, lower_bound, self.growth))

    def again(self, state: ExactState) -> ExactState:
        """Return the state of an earlier search, prepared for this search to continue with a larger `most_us`."""
        lower(state.search, self.most_us)
        kept = state.incumbent is not None and state.incumbent.makespan_us < self.most_us
        return state if kept else replace(state, incumbent=None)

    def step(self, t: Tables, state: ExactState) -> ExactState:
        stale_after = max(STALE_AFTER_LEAST, STALE_AFTER * state.improved_at)
        share = self.improving_share * (1 if state.improving_evaluations < stale_after else STALE_SHARE)
        if state.improving_evaluations < share * state.proving_evaluations:
            return _improve(t, state)
        ended = advance(t, state.search, EVALUATIONS_A_STEP)
        state = _adopt(state, best_plan(state.search))
        if ended:
            return self._after_round(t, state)
        spent = state.proving_evaluations - state.began_at
        most = max(EVALUATIONS_A_STEP, TOO_DEAR * state.last_round, TOO_LONG * state.began_at)
        too_dear = spent > most and state.growth > LEAST_GROWTH  # a lower threshold proves more in the time
        return _next_round(t, replace(state, growth=state.growth / 2)) if too_dear else state

    def terminate(self, t: Tables, state: ExactState) -> SearchOutcome | None:
        if state.incumbent is None:
            return SearchOutcome.INFEASIBLE if state.ended else None
        makespan, bound = state.incumbent.makespan_us, state.proved_us
        if state.ended or makespan <= bound:
            return SearchOutcome.OPTIMAL
        return SearchOutcome.WITHIN_GAP if makespan <= bound * (1 + self.max_gap) else None

    def _after_round(self, t: Tables, state: ExactState) -> ExactState:
        """Raise the bounds to LEAST_LEFT, below which the round left out no plan; it knows the best of the others."""
        best, least_left = int(state.search.scalars[BEST]), int(state.search.tally[LEAST_LEFT])
        in_any_order = min(best, least_left, int(state.search.tally[LEAST_BOUND]))
        state = replace(state, lower_bound_us=max(state.lower_bound_us, in_any_order))
        if least_left >= best:
            return replace(state, proved_us=min(best, INFINITE), ended=True)
        spent = state.proving_evaluations - state.began_at
        dearer = spent / max(SMALL_ROUND, state.last_round)
        growth = min(MOST_GROWTH, state.growth * min(2.0, max(0.5, DEARER / max(dearer, 0.1))))
        proved = max(least_left, state.proved_us)
        return _next_round(t, replace(state, proved_us=proved, growth=growth, last_round=spent))


def _next_round(t: Tables, state: ExactState) -> ExactState:
    begin(t, state.search, int(state.proved_us * (1 + state.growth)) + 1)
    return replace(state, began_at=state.proving_evaluations)


def _improve(t: Tables, state: ExactState) -> ExactState:
    """Search a step for a better plan: near the best plan while that is new, else anywhere."""
    if state.near is None or state.annealing.evaluations <= state.near_evaluations:
        annealing = step_annealing(t, state.annealing)
        improved = _adopt(replace(state, annealing=annealing), annealing.best)
    else:
        near = step_neighbourhood(t, state.near)
        if near is None:
            return replace(state, near=None)
        spent = state.near_evaluations + near.evaluations - state.near.evaluations
        improved = _adopt(replace(state, near=near, near_evaluations=spent), near.center)
    if improved.incumbent is state.incumbent:
        return improved
    return replace(improved, improved_at=improved.improving_evaluations)


def _adopt(state: ExactState, plan: Incumbent | None) -> ExactState:
    """Take a plan if it is better than the best so far: it prunes the round, and is the next to be searched around."""
    best = INFINITE if state.incumbent is None else state.incumbent.makespan_us
    if plan is None or plan.makespan_us >= best:
        return state
    lower(state.search, plan.makespan_us)
    near = Neighbourhoods(plan) if state.near is None else state.near.around(plan)
    return replace(state, incumbent=plan, near=near)
