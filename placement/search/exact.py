"""The exact search: iterative deepening proves bounds, local search finds plans, each prunes the other.

A plan found by local search lowers the threshold of the round that is under way; a round that ends raises the lower
bound to the least that it left, and the next threshold stands a little above that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from prefect_rlhf.placement.search.deepening import (
    BEST,
    EVALUATIONS,
    INFINITE,
    LEAST_LEFT,
    Round,
    advance,
    begin,
    empty_round,
    lower,
)
from prefect_rlhf.placement.search.incumbent import Incumbent
from prefect_rlhf.placement.search.local import LocalState, begin_local, step_local
from prefect_rlhf.placement.search.outcome import Outcome
from prefect_rlhf.placement.search.partial import bound_partial, empty_partial
from prefect_rlhf.placement.search.tables import Tables

CHUNK = 5_000  # evaluations of deepening in one step: some ten milliseconds
SMALL_ROUND = 1_000  # a round of fewer evaluations costs nothing, so the next may go further


@dataclass(frozen=True, slots=True)
class Frontier:
    """Where both searches are. The arrays of `round` and `local` are changed in place."""

    round: Round
    local: LocalState
    lower_bound_us: int
    growth: float
    incumbent: Incumbent | None = None
    ended: bool = False
    began_at: int = 0  # evaluations when the round under way began

    @property
    def evaluations(self) -> int:
        """Bounds and schedules computed so far."""
        return int(self.round.numbers[EVALUATIONS]) + self.local.evaluations


@final
@dataclass(frozen=True, slots=True)
class IterativeDeepening:
    """`growth` is by how much of itself the threshold is raised from round to round.

    `local_share` is how many evaluations local search gets for one of deepening.
    """

    seed: int = 0
    max_gap: float = 0.0
    growth: float = 0.0015
    local_share: float = 0.25

    def init(self, t: Tables) -> Frontier:
        lower_bound = int(bound_partial(t, empty_partial(t), INFINITE))
        state = Frontier(empty_round(t), begin_local(t, self.seed), lower_bound, self.growth)
        return _next_round(state)

    def step(self, t: Tables, state: Frontier) -> Frontier:
        if state.local.evaluations < self.local_share * state.round.numbers[EVALUATIONS]:
            return _adopt_local(t, replace(state, local=step_local(t, state.local)))
        ended = advance(t, state.round, CHUNK)
        state = _adopt_deepening(state)
        return self._after_round(state) if ended else state

    def terminate(self, t: Tables, state: Frontier) -> Outcome | None:
        if state.incumbent is None:
            return Outcome.INFEASIBLE if state.ended else None
        makespan, bound = state.incumbent.makespan_us, state.lower_bound_us
        if state.ended or makespan <= bound:
            return Outcome.OPTIMAL
        return Outcome.WITHIN_GAP if makespan <= bound * (1 + self.max_gap) else None

    def _after_round(self, state: Frontier) -> Frontier:
        """All plans that the round left take `least_left` or more, and of the others the best is known."""
        best, left = (int(state.round.numbers[index]) for index in (BEST, LEAST_LEFT))
        if left >= best:
            return replace(state, lower_bound_us=min(best, INFINITE), ended=True)
        cheap = state.round.numbers[EVALUATIONS] - state.began_at < SMALL_ROUND
        growth = min(2 * state.growth, 8 * self.growth) if cheap else self.growth
        return _next_round(replace(state, lower_bound_us=max(left, state.lower_bound_us), growth=growth))


def _next_round(state: Frontier) -> Frontier:
    begin(state.round, int(state.lower_bound_us * (1 + state.growth)) + 1)
    return replace(state, began_at=int(state.round.numbers[EVALUATIONS]))


def _adopt_local(t: Tables, state: Frontier) -> Frontier:
    """Let a better plan of local search prune the round."""
    if state.incumbent is not None and state.incumbent.makespan_us <= state.local.cost:
        return state
    found = Incumbent.of(t, state.local.placed, state.local.cost)
    if found is None:
        return state
    lower(state.round, found.makespan_us)
    return replace(state, incumbent=found)


def _adopt_deepening(state: Frontier) -> Frontier:
    best = int(state.round.numbers[BEST])
    if best >= (state.incumbent.makespan_us if state.incumbent is not None else INFINITE):
        return state
    found = Incumbent(best, tuple(map(int, state.round.best_option)), tuple(map(int, state.round.best_mesh)))
    return replace(state, incumbent=found)
