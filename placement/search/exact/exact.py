"""The exact search: iterative deepening proves bounds, annealing finds plans, each prunes the other.

A plan found by annealing lowers the threshold of the round that is under way; a round that ends raises the lower
bound to the least that it left, and the next threshold stands a little above that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from prefect_rlhf.placement.search.exact.deepening import advance, begin, decision_order, lower
from prefect_rlhf.placement.search.exact.neighbourhood import Neighbourhoods, found_by, step_neighbourhood
from prefect_rlhf.placement.search.exact.search_state import (
    BEST,
    EVALUATIONS,
    INFINITE,
    LEAST_LEFT,
    SearchState,
    empty_search_state,
)
from prefect_rlhf.placement.search.partial.incumbent import Incumbent, SearchOutcome
from prefect_rlhf.placement.search.partial.partial import bound_partial, empty_partial
from prefect_rlhf.placement.search.sampling.annealing import AnnealingState, begin_annealing, step_annealing
from prefect_rlhf.placement.search.tables.tables import Tables

CHUNK = 5_000  # evaluations of deepening in one step: some ten milliseconds
DEARER = 2.0  # by which factor each round shall take more evaluations than the one before
SMALL_ROUND = 1_000  # evaluations of a round that costs nothing
MOST_GROWTH = 0.02
LEAST_GROWTH = 1e-5
TOO_DEAR = 8.0  # times the evaluations of the round before, after which a round is given up for a lower threshold
PATIENCE = 3.0  # times the evaluations at which the search for plans last found one, until it is stale
LEAST_PATIENCE = 1_000_000  # evaluations
STALE = 0.2  # of its share is left to it then
TOO_LONG = 0.25  # of all evaluations before: as long a round may take in any case


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where both searches are. The arrays of `round` and `annealing` are changed in place.

    `near` is None as long as there is no plan, and when all around the best have been searched.
    """

    round: SearchState
    annealing: AnnealingState
    lower_bound_us: int
    growth: float
    incumbent: Incumbent | None = None
    near: Neighbourhoods | None = None
    near_evaluations: int = 0
    improved_at: int = 0  # `improving_evaluations` when these last found a better plan
    ended: bool = False
    began_at: int = 0  # evaluations when the round under way began
    last_round: int = 0  # evaluations of the round before

    @property
    def improving_evaluations(self) -> int:
        """Those spent on finding plans, not on bounds."""
        return self.annealing.evaluations + self.near_evaluations

    @property
    def evaluations(self) -> int:
        """Bounds and schedules computed so far."""
        return int(self.round.left[EVALUATIONS]) + self.improving_evaluations


@final
@dataclass(frozen=True, slots=True)
class IterativeDeepening:
    """`growth` is by how much of itself the threshold is first raised; later so that each round costs twice the last.

    `improving_share` is how many evaluations the search for plans gets for one of deepening, until it is stale.
    """

    seed: int = 0
    max_gap: float = 0.0
    growth: float = 0.0015
    improving_share: float = 0.5

    def init(self, t: Tables) -> Frontier:
        lower_bound = int(bound_partial(t, empty_partial(t), INFINITE))
        round = empty_search_state(t, decision_order(t))
        return _next_round(t, Frontier(round, begin_annealing(t, self.seed), lower_bound, self.growth))

    def step(self, t: Tables, state: Frontier) -> Frontier:
        if state.improving_evaluations < self._share(state) * state.round.left[EVALUATIONS]:
            return _improve(t, state)
        ended = advance(t, state.round, CHUNK)
        state = _adopt(state, found_by(state.round))
        if ended:
            return self._after_round(t, state)
        return _next_round(t, replace(state, growth=state.growth / 2)) if _too_dear(state) else state

    def _share(self, state: Frontier) -> float:
        """Less for a search for plans that has found none for long."""
        patience = max(LEAST_PATIENCE, PATIENCE * state.improved_at)
        return self.improving_share * (1 if state.improving_evaluations < patience else STALE)

    def terminate(self, t: Tables, state: Frontier) -> SearchOutcome | None:
        if state.incumbent is None:
            return SearchOutcome.INFEASIBLE if state.ended else None
        makespan, bound = state.incumbent.makespan_us, state.lower_bound_us
        if state.ended or makespan <= bound:
            return SearchOutcome.OPTIMAL
        return SearchOutcome.WITHIN_GAP if makespan <= bound * (1 + self.max_gap) else None

    def _after_round(self, t: Tables, state: Frontier) -> Frontier:
        """All plans that the round left take `least_left` or more, and of the others the best is known."""
        best, left = int(state.round.numbers[BEST]), int(state.round.left[LEAST_LEFT])
        if left >= best:
            return replace(state, lower_bound_us=min(best, INFINITE), ended=True)
        spent = int(state.round.left[EVALUATIONS]) - state.began_at
        dearer = spent / max(SMALL_ROUND, state.last_round)
        growth = min(MOST_GROWTH, state.growth * min(2.0, max(0.5, DEARER / max(dearer, 0.1))))
        bound = max(left, state.lower_bound_us)
        return _next_round(t, replace(state, lower_bound_us=bound, growth=growth, last_round=spent))


def _too_dear(state: Frontier) -> bool:
    """Whether the round under way takes so long that a lower threshold proves more in the time."""
    spent = int(state.round.left[EVALUATIONS]) - state.began_at
    most = max(CHUNK, TOO_DEAR * state.last_round, TOO_LONG * state.began_at)
    return spent > most and state.growth > LEAST_GROWTH


def _next_round(t: Tables, state: Frontier) -> Frontier:
    begin(t, state.round, int(state.lower_bound_us * (1 + state.growth)) + 1)
    return replace(state, began_at=int(state.round.left[EVALUATIONS]))


def _improve(t: Tables, state: Frontier) -> Frontier:
    """One step of the search for a better plan: near the best one while that is new, else anywhere."""
    if state.near is None or state.annealing.evaluations <= state.near_evaluations:
        annealing = step_annealing(t, state.annealing)
        return _improved(replace(state, annealing=annealing), annealing.found)
    near = step_neighbourhood(t, state.near)
    if near is None:
        return replace(state, near=None)
    spent = state.near_evaluations + near.evaluations - state.near.evaluations
    return _improved(replace(state, near=near, near_evaluations=spent), near.center)


def _improved(state: Frontier, found: Incumbent | None) -> Frontier:
    adopted = _adopt(state, found)
    better = adopted.incumbent is not state.incumbent
    return replace(adopted, improved_at=state.improving_evaluations) if better else adopted


def _adopt(state: Frontier, found: Incumbent | None) -> Frontier:
    """Take a plan if it is better than the best so far: it prunes the round, and what is near it is looked at next."""
    best = INFINITE if state.incumbent is None else state.incumbent.makespan_us
    if found is None or found.makespan_us >= best:
        return state
    lower(state.round, found.makespan_us)
    near = Neighbourhoods(found) if state.near is None else state.near.around(found)
    return replace(state, incumbent=found, near=near)
