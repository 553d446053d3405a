"""Metropolis-Hastings as in ReaL (section 5.2): the baseline that other systems' planners use.

P(plan) is proportional to exp(-beta * makespan). A proposal assigns to a call, drawn uniformly, a (mesh, strategy)
pair, drawn uniformly; it is accepted with probability min(1, P(new) / P(old)). It starts from each call's own fastest
pair. It proves no bound; its lower bound is that of the whole problem.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.partial.complete import INFINITE, CompletePlan, empty_complete_plan, evaluate, fits
from prefect_rlhf.placement.search.partial.incumbent import Incumbent, SearchOutcome
from prefect_rlhf.placement.search.partial.partial import bound_partial, empty_partial
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.sampling.random_moves import PROPOSALS_A_STEP, below, fraction
from prefect_rlhf.placement.search.tables.tables import Tables


@dataclass(frozen=True, slots=True, eq=False)
class Chain(Record):
    """The state of the Markov chain; arrays are changed in place."""

    plan: CompletePlan
    pair_end: Ints  # see `draw_pair`
    cost: Ints  # [2]: of the plan, and of the best that fits
    best_option: Ints  # [C]
    best_mesh: Ints  # [C]
    random: Ints  # [1]


@dataclass(frozen=True, slots=True)
class ChainState:
    """The chain and the best plan so far. `scale` is beta per microsecond."""

    chain: Chain
    scale: float
    lower_bound_us: int
    incumbent: Incumbent | None = None
    evaluations: int = 0


@final
@dataclass(frozen=True, slots=True)
class MetropolisHastings:
    """The search. `beta` applies to makespans relative to the start plan's."""

    seed: int = 0
    beta: float = 50.0

    def init(self, t: Tables) -> ChainState:
        plan = _each_alone_fastest(t)
        cost = int(evaluate(t, plan))
        meshes_of_option = np.diff(t.class_start)[t.option_class]
        spans = zip(t.option_start[:-1], t.option_start[1:], strict=True)
        pair_end = np.concatenate([np.cumsum(meshes_of_option[first:last]) for first, last in spans])
        best = cost if fits(t, plan) else INFINITE
        costs, random = np.array([cost, best], dtype=np.int64), np.array([self.seed], dtype=np.int64)
        chain = Chain(plan, pair_end, costs, plan.option.copy(), plan.mesh.copy(), random)
        lower_bound = int(bound_partial(t, empty_partial(t), INFINITE))
        return ChainState(chain, self.beta / cost, lower_bound, _best(chain))

    def step(self, t: Tables, state: ChainState) -> ChainState:
        walk(t, state.chain, state.scale, PROPOSALS_A_STEP)
        return replace(state, incumbent=_best(state.chain), evaluations=state.evaluations + PROPOSALS_A_STEP)

    def terminate(self, t: Tables, state: ChainState) -> SearchOutcome | None:
        is_optimal = state.incumbent is not None and state.incumbent.makespan_us <= state.lower_bound_us
        return SearchOutcome.OPTIMAL if is_optimal else None


def _each_alone_fastest(t: Tables) -> CompletePlan:
    plan = empty_complete_plan(t)
    for call in range(t.num_calls):
        own = slice(t.option_start[call], t.group_start[call])
        plan.option[call] = int(np.argmin(t.option_cost[own]))
        plan.mesh[call] = t.class_mesh[t.class_start[t.option_class[own][plan.option[call]]]]
    return plan


def _best(chain: Chain) -> Incumbent | None:
    return Incumbent.from_arrays(chain.cost[1], chain.best_option, chain.best_mesh)


@inner
def draw_pair(t: Tables, state: Ints, pair_end: Ints, call: int) -> tuple[int, int]:
    """Draw an (option, mesh) pair of the call, each with the same probability.

    `pair_end` counts the pairs of a call up to and including each of its options.
    """
    low, high = t.option_start[call], t.group_start[call] - 1
    drawn = below(state, pair_end[high])
    while low < high:
        middle = (low + high) // 2
        if pair_end[middle] > drawn:
            high = middle
        else:
            low = middle + 1
    after_class = t.class_start[t.option_class[low] + 1]
    return low - t.option_start[call], t.class_mesh[after_class - (pair_end[low] - drawn)]


@compiled
def walk(t: Tables, chain: Chain, scale: float, count: int) -> None:
    """Make `count` proposals."""
    plan = chain.plan
    for _ in range(count):
        call = below(chain.random, t.num_calls)
        option, mesh = plan.option[call], plan.mesh[call]
        plan.option[call], plan.mesh[call] = draw_pair(t, chain.random, chain.pair_end, call)
        cost = evaluate(t, plan)
        if math.log(fraction(chain.random)) >= scale * (chain.cost[0] - cost):
            plan.option[call], plan.mesh[call] = option, mesh
            continue
        chain.cost[0] = cost
        if cost < chain.cost[1] and fits(t, plan):
            chain.cost[1] = cost
            for other in range(t.num_calls):
                chain.best_option[other], chain.best_mesh[other] = plan.option[other], plan.mesh[other]
