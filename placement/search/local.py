"""Local search: change one call at a time for the best while that helps, then shake two calls and begin again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from prefect_rlhf.placement.search.placed import Placed, empty_placed, evaluate, improve_call
from prefect_rlhf.placement.search.tables import Tables

SHAKEN_CALLS = 2


@dataclass(frozen=True, slots=True)
class LocalState:
    """Where local search is. Arrays and generator are changed in place."""

    placed: Placed
    random: Random
    cost: int
    next_call: int = 0
    unimproved: int = 0  # calls since one could be changed for the better
    evaluations: int = 0


def begin_local(t: Tables, seed: int) -> LocalState:
    """Start at a random plan."""
    random = Random(seed)
    placed = empty_placed(t)
    for call in range(t.num_calls):
        place_at_random(t, placed, random, call)
    return LocalState(placed, random, int(evaluate(t, placed)))


def step_local(t: Tables, state: LocalState) -> LocalState:
    """Improve one call; at a local optimum, shake instead."""
    if state.unimproved == t.num_calls:
        return _shaken(t, state)
    cost, tried = improve_call(t, state.placed, state.next_call, state.cost)
    return replace(
        state,
        cost=int(cost),
        next_call=(state.next_call + 1) % t.num_calls,
        unimproved=0 if cost < state.cost else state.unimproved + 1,
        evaluations=state.evaluations + int(tried),
    )


def place_at_random(t: Tables, placed: Placed, random: Random, call: int) -> None:
    """Give a call one of its (option, mesh) pairs: the option first, then one of its meshes."""
    option = random.randrange(int(t.option_start[call + 1] - t.option_start[call]))
    found = t.option_class[t.option_start[call] + option]
    placed.option[call] = option
    placed.mesh[call] = t.class_mesh[random.randrange(int(t.class_start[found]), int(t.class_start[found + 1]))]


def _shaken(t: Tables, state: LocalState) -> LocalState:
    for call in state.random.sample(range(t.num_calls), min(SHAKEN_CALLS, t.num_calls)):
        place_at_random(t, state.placed, state.random, call)
    return replace(state, cost=int(evaluate(t, state.placed)), unimproved=0, evaluations=state.evaluations + 1)
