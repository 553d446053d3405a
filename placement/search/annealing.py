"""Metropolis-Hastings as in ReaL (section 5.2): the baseline that other systems' planners use.

P(plan) is proportional to exp(-beta * makespan). A proposal gives one call, drawn evenly, one of its (mesh, strategy)
pairs, drawn evenly; it is accepted with probability min(1, P(new) / P(old)). It starts where each call alone is
fastest. Nothing is proved: the lower bound is that of the problem as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import final

import numpy as np

from prefect_rlhf.placement.search.incumbent import Incumbent
from prefect_rlhf.placement.search.outcome import Outcome
from prefect_rlhf.placement.search.partial import bound_partial, empty_partial
from prefect_rlhf.placement.search.placed import Placed, empty_placed, evaluate
from prefect_rlhf.placement.search.tables import Ints, Tables

PROPOSALS_A_STEP = 200


@dataclass(frozen=True, slots=True)
class Chain:
    """Where the walk is. Arrays and generator are changed in place."""

    placed: Placed
    random: Random
    cost: int
    scale: float  # beta per microsecond
    lower_bound_us: int
    incumbent: Incumbent | None
    evaluations: int = 0


@final
@dataclass(frozen=True, slots=True)
class MetropolisHastings:
    """`beta` is for a makespan in units of the start plan's."""

    seed: int = 0
    beta: float = 50.0
    max_evaluations: int | None = field(default=None)

    def init(self, t: Tables) -> Chain:
        placed = empty_placed(t)
        for call in range(t.num_calls):
            own = t.option_cost[t.option_start[call] : t.option_start[call + 1]]
            placed.option[call] = int(np.argmin(own))
            placed.mesh[call] = meshes_of(t, call, int(placed.option[call]))[0]
        cost = int(evaluate(t, placed))
        lower_bound = int(bound_partial(t, empty_partial(t), 1 << 62))
        chain = Chain(placed, Random(self.seed), cost, self.beta / cost, lower_bound, None)
        return replace(chain, incumbent=_better(t, chain))

    def step(self, t: Tables, state: Chain) -> Chain:
        for _ in range(PROPOSALS_A_STEP):
            state = _propose(t, state)
        return state

    def terminate(self, t: Tables, state: Chain) -> Outcome | None:
        if state.incumbent is not None and state.incumbent.makespan_us <= state.lower_bound_us:
            return Outcome.OPTIMAL
        spent = self.max_evaluations is not None and state.evaluations >= self.max_evaluations
        return Outcome.OUT_OF_BUDGET if spent else None


def meshes_of(t: Tables, call: int, option: int) -> Ints:
    """The meshes on which an option can run."""
    found = t.option_class[t.option_start[call] + option]
    return t.class_mesh[t.class_start[found] : t.class_start[found + 1]]


def draw_pair(t: Tables, random: Random, call: int) -> tuple[int, int]:
    """One of the call's (option, mesh) pairs, each as likely as any other."""
    classes = t.option_class[t.option_start[call] : t.option_start[call + 1]]
    ends = np.cumsum(t.class_start[classes + 1] - t.class_start[classes])
    drawn = random.randrange(int(ends[-1]))
    option = int(np.searchsorted(ends, drawn, side="right"))
    return option, int(meshes_of(t, call, option)[drawn - ends[option]])


def _propose(t: Tables, state: Chain) -> Chain:
    placed, random = state.placed, state.random
    call = random.randrange(t.num_calls)
    before = placed.option[call], placed.mesh[call]
    placed.option[call], placed.mesh[call] = draw_pair(t, random, call)
    cost = int(evaluate(t, placed))
    if math.log(1.0 - random.random()) >= state.scale * (state.cost - cost):
        placed.option[call], placed.mesh[call] = before
        return replace(state, evaluations=state.evaluations + 1)
    moved = replace(state, cost=cost, evaluations=state.evaluations + 1)
    return replace(moved, incumbent=_better(t, moved))


def _better(t: Tables, state: Chain) -> Incumbent | None:
    """The best plan so far, of those that fit."""
    if state.incumbent is not None and state.incumbent.makespan_us <= state.cost:
        return state.incumbent
    return Incumbent.of(t, state.placed, state.cost)
