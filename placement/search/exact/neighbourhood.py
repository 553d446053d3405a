"""Search around the best plan: free a few calls, keep all others as they are, and search those few exactly.

First every pair of calls, then every three: large neighbourhoods (Shaw, 1998), pruned by the bound of what is kept.
Each gets a limited number of evaluations; a better plan begins anew around itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from prefect_rlhf.placement.search.exact.deepening import advance, begin_within, decision_order, lower
from prefect_rlhf.placement.search.exact.search_state import BEST, EVALUATIONS, SearchState, empty_search_state
from prefect_rlhf.placement.search.partial.incumbent import Incumbent
from prefect_rlhf.placement.search.tables.tables import Tables

MOST_FREE = 3
MOST_EVALUATIONS = 20_000  # for one neighbourhood; enough for two calls of some hundred options each


@dataclass(frozen=True, slots=True)
class Neighbourhoods:
    """Which calls to free next around `center`, and the evaluations so far."""

    center: Incumbent
    number: int = 0
    evaluations: int = 0

    def around(self, center: Incumbent) -> Neighbourhoods:
        """Begin anew around a better plan, going on in the list where it was found."""
        return replace(self, center=center, number=0)


def subsets(num_calls: int) -> list[tuple[int, ...]]:
    """The sets of calls to free, small ones first."""
    return [free for size in range(2, MOST_FREE + 1) for free in combinations(range(num_calls), min(size, num_calls))]


def step_neighbourhood(t: Tables, state: Neighbourhoods) -> Neighbourhoods | None:
    """Search one neighbourhood; None when all around this plan have been searched."""
    free_sets = subsets(t.num_calls)
    if state.number == len(free_sets):
        return None
    free = free_sets[state.number]
    r = _round_within(t, state.center, free)
    advance(t, r, MOST_EVALUATIONS)
    searched = replace(state, number=state.number + 1, evaluations=state.evaluations + int(r.left[EVALUATIONS]))
    if r.numbers[BEST] >= state.center.makespan_us:
        return searched
    return searched.around(found_by(r))


def found_by(r: SearchState) -> Incumbent:
    """The best plan that a round has come to."""
    return Incumbent(int(r.numbers[BEST]), tuple(map(int, r.best_option)), tuple(map(int, r.best_mesh)))


def _round_within(t: Tables, center: Incumbent, free: Sequence[int]) -> SearchState:
    order = decision_order(t)
    kept = [call for call in order if call not in free]
    r = empty_search_state(t, [*kept, *(call for call in order if call in free)], len(kept))
    lower(r, center.makespan_us)
    begin_within(t, r, center.placed(t), len(kept))
    return r
