"""Simulated annealing (Kirkpatrick 1983), compiled: finds good plans quickly, but proves no bound.

A proposal changes a single call: its strategy, or its mesh (to another call's mesh, a mesh of similar size, or any
mesh) with a strategy for it. Plans that overflow memory are accepted only until the first plan that fits; meanwhile the
cost is the excess bytes. Runs get longer, and each starts from the end of the previous run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.partial.complete import (
    INFINITE,
    CompletePlan,
    empty_complete_plan,
    fill_relations,
    overflow,
    own_bound,
    time_by_schedule,
)
from prefect_rlhf.placement.search.partial.incumbent import Incumbent
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.sampling.random_moves import PROPOSALS_A_STEP, below, fraction
from prefect_rlhf.placement.search.tables.tables import Tables, calls_with_moves

HOT, COLD = 0.08, 0.0003  # temperatures, in units of the plan's cost
FIRST_RUN, LONGEST_RUN = 20_000, 2_000_000  # proposals
SIMILAR = 2  # classes up or down
MISFIT = 1 << 60  # the cost of a plan that overflows is this and the bytes too many


@dataclass(frozen=True, slots=True, eq=False)
class Walk(Record):
    """The current plan and the best so far; arrays are changed in place."""

    plan: CompletePlan
    kept: Ints  # options worth proposing, by call and class
    kept_start: Ints  # [C, K + 1]: the start of the options of a call and class
    cost: Ints  # [2]: of the plan, and of the best that fits
    best_option: Ints  # [C]
    best_mesh: Ints  # [C]
    random: Ints  # [1]


@dataclass(frozen=True, slots=True)
class AnnealingState:
    """The state of annealing after `done` proposals of a run of `length`."""

    walk: Walk
    length: int = FIRST_RUN
    done: int = 0
    evaluations: int = 0

    @property
    def best(self) -> Incumbent | None:
        """The best plan so far."""
        return Incumbent.from_arrays(self.walk.cost[1], self.walk.best_option, self.walk.best_mesh)


def begin_annealing(t: Tables, seed: int) -> AnnealingState:
    """Start with each call's first option on the first mesh for it."""
    plan = empty_complete_plan(t)
    kept, kept_start = options_worth_proposing(t)
    walk = Walk(
        plan=plan,
        kept=kept,
        kept_start=kept_start,
        cost=np.array([INFINITE, INFINITE], dtype=np.int64),
        best_option=plan.option.copy(),
        best_mesh=plan.mesh.copy(),
        random=np.array([seed], dtype=np.int64),
    )
    return AnnealingState(walk)


def step_annealing(t: Tables, state: AnnealingState) -> AnnealingState:
    """Make some proposals; after the last proposal of a run, begin a new run at the high temperature."""
    anneal(t, state.walk, state.done, PROPOSALS_A_STEP, state.length)
    done, evaluations = state.done + PROPOSALS_A_STEP, state.evaluations + PROPOSALS_A_STEP
    if done < state.length:
        return replace(state, done=done, evaluations=evaluations)
    return replace(state, length=min(2 * state.length, LONGEST_RUN), done=0, evaluations=evaluations)


def options_worth_proposing(t: Tables) -> tuple[Ints, Ints]:
    """A call's Pareto-optimal options on each class of meshes: no other option beats them in both time and memory.

    If weights move or copies are shared, a slower option can be better, so all options are kept.
    """
    with_moves = calls_with_moves(t)
    kept: list[int] = []
    starts = np.zeros((t.num_calls, len(t.class_size) + 1), dtype=np.int64)
    for call in range(t.num_calls):
        span = slice(t.option_start[call], t.group_start[call])
        keep_all = call in with_moves or (t.option_copy[span] >= 0).any()
        for number in range(len(t.class_size)):
            starts[call, number] = len(kept)
            own = np.flatnonzero(t.option_class[span] == number)
            kept += own.tolist() if keep_all else own[_pareto_front(t, own + t.option_start[call])].tolist()
        starts[call, -1] = len(kept)
    return np.array(kept, dtype=np.int64), starts


def _pareto_front(t: Tables, options: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    costs = np.stack(
        [t.option_cost[options], t.option_static[options], t.option_static[options] + t.option_active[options]]
    )
    no_worse = (costs[:, :, None] <= costs[:, None, :]).all(axis=0)  # [a, b]: a is no worse than b
    first = np.arange(len(options))[:, None] < np.arange(len(options))[None, :]
    return np.asarray(~(no_worse & (~no_worse.T | first)).any(axis=0))


@inner
def cost_of(t: Tables, walk: Walk, limit: int) -> int:
    """Microseconds or, for a plan that overflows, MISFIT plus the excess bytes. Above `limit` a bound suffices."""
    plan = walk.plan
    fill_relations(t, plan)
    excess = overflow(t, plan)
    if excess > 0:
        return MISFIT + excess
    bound = own_bound(t, plan, limit + 1)
    return bound if bound > limit else max(bound, time_by_schedule(t, plan))


@compiled
def anneal(t: Tables, walk: Walk, done: int, count: int, length: int) -> None:
    """Make proposals `done` to `done + count` of a run of `length`; before the first, compute the cost of the start."""
    plan = walk.plan
    if walk.cost[0] == INFINITE:
        walk.cost[0] = cost_of(t, walk, INFINITE)
    for number in range(done, done + count):
        temperature = HOT * (COLD / HOT) ** (number / length)
        call = below(walk.random, t.num_calls)
        option, mesh = plan.option[call], plan.mesh[call]
        if not propose(t, walk, call):
            continue
        limit = acceptable(walk, temperature)
        cost = cost_of(t, walk, limit)
        if cost > limit:
            plan.option[call], plan.mesh[call] = option, mesh
            continue
        walk.cost[0] = cost
        if cost < MISFIT and cost < walk.cost[1]:
            walk.cost[1] = cost
            for other in range(t.num_calls):
                walk.best_option[other], walk.best_mesh[other] = plan.option[other], plan.mesh[other]


@inner
def acceptable(walk: Walk, temperature: float) -> int:
    """The highest cost that the next plan may have: the current cost plus a random share of it."""
    present = walk.cost[0]
    base = MISFIT if present >= MISFIT else 0
    return present + int(-math.log(fraction(walk.random)) * temperature * (present - base))


@inner
def propose(t: Tables, walk: Walk, call: int) -> bool:
    """Change a call. Returns False if the call has no option on the drawn mesh."""
    plan, random = walk.plan, walk.random
    mesh_class, mesh = t.option_class[t.option_start[call] + plan.option[call]], plan.mesh[call]
    way = below(random, 5)
    if way == 1:
        other = below(random, t.num_calls)
        mesh_class, mesh = t.option_class[t.option_start[other] + plan.option[other]], plan.mesh[other]
    elif way >= 2:
        if way == 2:
            nearby = mesh_class - SIMILAR + below(random, 2 * SIMILAR + 1)
            mesh_class = max(0, min(len(t.class_size) - 1, nearby))
        else:
            mesh_class = below(random, len(t.class_size))
        first = t.class_start[mesh_class]
        mesh = t.class_mesh[first + below(random, t.class_start[mesh_class + 1] - first)]
    first, last = walk.kept_start[call, mesh_class], walk.kept_start[call, mesh_class + 1]
    if first == last:
        return False
    plan.option[call], plan.mesh[call] = walk.kept[first + below(random, last - first)], mesh
    return True
