"""The widest cycle: the nodes that surely run between two runs of a node, and their order in every plan.

`bound/orders.py` counts the orders of calls in it. A problem that counts no orders has no such cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, word
from prefect_rlhf.placement.search.problem import LinkNode, Problem
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.dependencies import NEVER, Direct, lags_with_own

NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class WidestCycle(Record):
    """A cycle begins when its anchor's run has ended, and ends with the anchor's next run.

    It has a single run of each member. The link nodes of its calls may lie outside.
    """

    anchor: int  # NONE without a cycle
    members: int  # set of nodes that surely run in it
    train_steps: int  # set of its calls that train
    before: Ints  # [V]: set of nodes whose runs in the cycle precede the node's in every plan
    visits_before: Ints  # [C]: set of calls with visits that precede the call's, if the two exclude each other


def widest_cycle(problem: Problem, calls: Mapping[str, int], direct: Direct) -> WidestCycle:
    """Return the cycle with the most calls.

    It has no anchor if the problem does not count orders, or if no cycle has a train_step and another call.
    """
    before, visits_before = np.zeros(len(problem.nodes), dtype=np.int64), np.zeros(len(calls), dtype=np.int64)
    no_cycle = WidestCycle(NONE, 0, 0, before, visits_before)
    if not problem.counts_orders:  # as in every problem that is searched for plans
        return no_cycle
    lags = lags_with_own(direct)
    number = {node.name: index for index, node in enumerate(problem.nodes)}
    anchor, run = _widest(lags, [number[name] for name in calls])
    inside = {name for name in calls if run[number[name]] < NEVER}
    train_steps = {call.name for call in problem.calls if call.kind == "train_step"} & inside
    if not train_steps or len(inside) == 1:
        return no_cycle
    member = run < NEVER
    for link in (node for node in problem.nodes if isinstance(node, LinkNode) and node.call in inside):
        at, run_of_call = number[link.name], run[number[link.call]]
        member[at] &= run[at] == run_of_call
        run[at] = run_of_call
    for node in np.flatnonzero(run < NEVER):
        later = run[node] - run
        earlier = (run < NEVER) & (lags[:, node] <= later) & (member | member[node] | (lags[:, node] == later))
        earlier[node] = False
        before[node] = word(earlier.tolist())
    for (first, second), lag in problem.visits_after.items():
        if {first, second} <= inside and run[number[second]] - run[number[first]] == lag:
            visits_before[calls[second]] |= 1 << calls[first]
    trained = word([name in train_steps for name in calls])
    return WidestCycle(anchor, word(member.tolist()), trained, before, visits_before)


def _widest(lags: Ints, calls: Sequence[int]) -> tuple[int, Ints]:
    """The anchor of the cycle with the most calls, and the number of each node's run in it; NEVER for other nodes.

    The cycle begins with the end of the anchor's run 0 and ends with its run 1.
    """
    around = lags + lags.T == 1
    anchor = max(range(len(lags)), key=lambda node: (around[node, calls].sum(), around[node].sum(), -node))
    run = np.where(around[anchor], lags[anchor], NEVER)
    run[anchor] = 1
    return anchor, run
