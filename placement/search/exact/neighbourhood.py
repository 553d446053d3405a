"""Searches around the best plan: frees a few calls, keeps all others, and searches the few exactly.

First it frees every pair of calls, then every three: large neighbourhoods (Shaw, 1998), pruned by the bound of the kept
calls. Each gets a limited number of evaluations. A better plan restarts the search around itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

from prefect_rlhf.placement.search.exact.deepening import advance, begin_within, best_plan, decision_order, lower
from prefect_rlhf.placement.search.exact.search_state import EVALUATIONS, empty_search_state
from prefect_rlhf.placement.search.partial.incumbent import Incumbent
from prefect_rlhf.placement.search.tables.tables import Tables

MOST_FREE = 3
MOST_EVALUATIONS = 20_000  # per neighbourhood; enough for two calls of some hundred options each


@dataclass(frozen=True, slots=True)
class Neighbourhoods:
    """The number of the next set of calls to free around `center`, and the evaluations so far."""

    center: Incumbent
    number: int = 0
    evaluations: int = 0

    def around(self, center: Incumbent) -> Neighbourhoods:
        """Start again around a better plan."""
        return replace(self, center=center, number=0)


def step_neighbourhood(t: Tables, state: Neighbourhoods) -> Neighbourhoods | None:
    """Search a neighbourhood; return None if all neighbourhoods of this plan have been searched."""
    calls = range(t.num_calls)
    free_sets = [free for size in range(2, MOST_FREE + 1) for free in combinations(calls, min(size, t.num_calls))]
    if state.number == len(free_sets):
        return None
    free = free_sets[state.number]
    order = sorted(decision_order(t), key=lambda call: call in free)
    num_kept = t.num_calls - len(free)
    s = empty_search_state(t, order, num_kept)
    lower(s, state.center.makespan_us)
    begin_within(t, s, state.center.complete_plan(t), num_kept)
    advance(t, s, MOST_EVALUATIONS)
    searched = replace(state, number=state.number + 1, evaluations=state.evaluations + int(s.tally[EVALUATIONS]))
    best = best_plan(s)
    return searched if best is None else searched.around(best)
