"""Simulated annealing (Kirkpatrick 1983): finds good plans soon and proves nothing; compiled.

A proposal changes one call: its strategy, or its mesh to that of another call, to one of similar size, or to any, each
with a strategy for it. Plans that overflow memory are passed through only until the first that fits; meanwhile the cost
is the bytes too many. Runs get longer, each from where the last one ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.bound.bound import bound_of, fill_areas
from prefect_rlhf.placement.search.bound.scratch import Scratch, scratch_for
from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.partial.complete import CompletePlan, empty_complete_plan, fill_relations, overflow
from prefect_rlhf.placement.search.partial.incumbent import Incumbent
from prefect_rlhf.placement.search.partial.list_schedule import list_schedule
from prefect_rlhf.placement.search.partial.partial import surely_absent
from prefect_rlhf.placement.search.sampling.random_moves import below, fraction
from prefect_rlhf.placement.search.tables.tables import Tables, calls_with_moves

HOT, COLD = 0.08, 0.0003  # temperatures, in units of the plan's cost
FIRST_RUN, LONGEST_RUN = 20_000, 2_000_000  # proposals
CHUNK = 2_000
SIMILAR = 2  # classes up or down
MISFIT = 1 << 60  # the cost of a plan that overflows is this and the bytes too many
NONE = 1 << 62


class Walk(NamedTuple):
    """Arrays are changed in place."""

    placed: CompletePlan
    kept: Ints  # options worth proposing, by call and class
    kept_start: Ints  # [C, K + 1]: where those of a call and class start
    cost: Ints  # [2]: of the plan, and of the best in this run
    best_option: Ints  # [C]
    best_mesh: Ints  # [C]
    random: Ints  # [1]
    area: Ints  # [V]: scratch, as all below
    explain: Ints  # [5]
    scratch: Scratch


@dataclass(frozen=True, slots=True)
class AnnealingState:
    """Where annealing is: proposal `done` of a run of `length`."""

    walk: Walk
    length: int = FIRST_RUN
    done: int = 0
    evaluations: int = 0

    @property
    def found(self) -> Incumbent | None:
        """The best plan so far."""
        walk = self.walk
        if walk.cost[1] == NONE:
            return None
        return Incumbent(int(walk.cost[1]), tuple(map(int, walk.best_option)), tuple(map(int, walk.best_mesh)))


def begin_annealing(t: Tables, seed: int) -> AnnealingState:
    """Start with each call's first option on the first mesh for it."""
    placed = empty_complete_plan(t)
    kept, kept_start = options_worth_proposing(t)
    walk = Walk(
        placed=placed,
        kept=kept,
        kept_start=kept_start,
        cost=np.array([NONE, NONE], dtype=np.int64),
        best_option=placed.option.copy(),
        best_mesh=placed.mesh.copy(),
        random=np.array([seed], dtype=np.int64),
        area=np.zeros(t.num_nodes, dtype=np.int64),
        explain=np.zeros(5, dtype=np.int64),
        scratch=scratch_for(t),
    )
    walk.cost[0] = cost_of(t, walk, NONE)
    return AnnealingState(walk)


def step_annealing(t: Tables, state: AnnealingState) -> AnnealingState:
    """Some proposals more; after the last of a run, a new one begins, hot again."""
    anneal(t, state.walk, state.done, CHUNK, state.length)
    done, evaluations = state.done + CHUNK, state.evaluations + CHUNK
    if done < state.length:
        return replace(state, done=done, evaluations=evaluations)
    return replace(state, length=min(2 * state.length, LONGEST_RUN), done=0, evaluations=evaluations)


def options_worth_proposing(t: Tables) -> tuple[Ints, Ints]:
    """Of a call's options on meshes of a class, those that no other beats in both time and memory.

    Where weights move or copies are shared, a slower option can be better, so all stay.
    """
    bound_to_others = calls_with_moves(t)
    kept: list[int] = []
    starts = np.zeros((t.num_calls, len(t.class_size) + 1), dtype=np.int64)
    for call in range(t.num_calls):
        span = slice(t.option_start[call], t.group_start[call])
        moves = call in bound_to_others or (t.option_copy[span] >= 0).any()
        for number in range(len(t.class_size)):
            starts[call, number] = len(kept)
            own = np.flatnonzero(t.option_class[span] == number)
            kept += own.tolist() if moves else own[_unbeaten(t, own + t.option_start[call])].tolist()
        starts[call, -1] = len(kept)
    return np.array(kept, dtype=np.int64), starts


def _unbeaten(t: Tables, options: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    costs = np.stack(
        [t.option_cost[options], t.option_static[options], t.option_static[options] + t.option_active[options]]
    )
    no_worse = (costs[:, :, None] <= costs[:, None, :]).all(axis=0)  # [a, b]: a is no worse than b
    first = np.arange(len(options))[:, None] < np.arange(len(options))[None, :]
    return np.asarray(~(no_worse & (~no_worse.T | first)).any(axis=0))


@compiled
def cost_of(t: Tables, walk: Walk, limit: int) -> int:
    """Microseconds; of a plan that overflows, MISFIT and the bytes too many. Above `limit` a bound will do."""
    placed = walk.placed
    excess = overflow(t, placed)
    if excess > 0:
        return MISFIT + excess
    fill_relations(t, placed)
    fill_areas(t, placed.option, t.least_area, t.least_size, placed.us, walk.area)
    gone = surely_absent(t, placed.option, placed.relation, placed.us)
    bound = bound_of(t, placed.us, walk.area, gone, placed.overlap, walk.scratch, limit + 1, walk.explain)
    return bound if bound > limit else list_schedule(t, placed.us, placed.overlap, placed.agenda)


@compiled
def anneal(t: Tables, walk: Walk, done: int, count: int, length: int) -> None:
    """Make proposals `done` to `done + count` of a run of `length`."""
    placed = walk.placed
    for number in range(done, done + count):
        temperature = HOT * (COLD / HOT) ** (number / length)
        call = below(walk.random, t.num_calls)
        option, mesh = placed.option[call], placed.mesh[call]
        if not propose(t, walk, call):
            continue
        limit = acceptable(walk, temperature)
        cost = cost_of(t, walk, limit)
        if cost > limit:
            placed.option[call], placed.mesh[call] = option, mesh
            continue
        walk.cost[0] = cost
        if cost < MISFIT and cost < walk.cost[1]:
            walk.cost[1] = cost
            for other in range(t.num_calls):
                walk.best_option[other], walk.best_mesh[other] = placed.option[other], placed.mesh[other]


@inner
def acceptable(walk: Walk, temperature: float) -> int:
    """The cost up to which the next plan is taken: a drawn part above that of the present one."""
    before = walk.cost[0]
    base = MISFIT if before >= MISFIT else 0
    return before + int(-math.log(fraction(walk.random)) * temperature * (before - base))


@inner
def propose(t: Tables, walk: Walk, call: int) -> bool:
    """Change a call. Returns False when the mesh drawn suits none of its options."""
    placed, random = walk.placed, walk.random
    found, mesh = t.option_class[t.option_start[call] + placed.option[call]], placed.mesh[call]
    way = below(random, 5)
    if way == 1:
        other = below(random, t.num_calls)
        found, mesh = t.option_class[t.option_start[other] + placed.option[other]], placed.mesh[other]
    elif way >= 2:
        if way == 2:
            found = max(0, min(len(t.class_size) - 1, found - SIMILAR + below(random, 2 * SIMILAR + 1)))
        else:
            found = below(random, len(t.class_size))
        first = t.class_start[found]
        mesh = t.class_mesh[first + below(random, t.class_start[found + 1] - first)]
    first, last = walk.kept_start[call, found], walk.kept_start[call, found + 1]
    if first == last:
        return False
    placed.option[call], placed.mesh[call] = walk.kept[first + below(random, last - first)], mesh
    return True
