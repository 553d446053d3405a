"""A lower bound on the seconds of an iteration of a long run, for any order of its nodes, compiled.

With (*) of `exclusive_work`, over many iterations: between two runs of an anchor, `lag` iterations apart, lie all nodes
of its cycle, so the period is at least (*) of these nodes over `lag`. If the lag is 1, nodes of the cycle that wait for
each other never run at the same time in any iterations. (*) of all nodes counts as well: with the exclusions that
always hold and, if the lag is 1, with the exclusions of the cycle.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.exclusion import exclude_always, exclude_in_cycle
from prefect_rlhf.placement.search.bound.exclusive_work import heaviest_work, rounded_up
from prefect_rlhf.placement.search.bound.scratch import ALL_ITERATIONS, CYCLE, Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner
from prefect_rlhf.placement.search.tables.dependencies import NEVER
from prefect_rlhf.placement.search.tables.tables import Tables


@inner
def period_bound(t: Tables, us: Ints, s: Scratch, nodes: int, enough: int) -> int:
    """Microseconds that no period is below; `nodes` take time. Stops at the first of its terms to reach `enough`.

    `s.conflict` and `s.area` are filled. Writes what binds.
    """
    best, all_counted = 0, False
    for number in range(len(t.anchor)):
        lag = t.anchor_lag[number]
        if best >= enough or lag >= NEVER:
            continue
        members = t.anchor_cycle[number] & nodes
        exclude_in_cycle(t, s.conflict, number, s.adjacent)
        if lag == 1:
            all_counted, members = True, nodes
            for node in range(t.num_nodes):
                s.adjacent[node] |= t.ordered_always[node]
        best = larger_of(t, us, s, members, CYCLE + number, lag, best)
    if all_counted or best >= enough:
        return best
    exclude_always(t, s.conflict, s.adjacent)
    return larger_of(t, us, s, nodes, ALL_ITERATIONS, 1, best)


@inner
def larger_of(t: Tables, us: Ints, s: Scratch, members: int, term: int, lag: int, best: int) -> int:
    """The larger of the best bound and (*) over `members` for `lag` iterations; if it is (*), write that it binds."""
    work, kept, fitting = heaviest_work(us, s.area, s, members, t.num_devices)
    value = rounded_up(work, t.num_devices * lag)
    if value > best:
        s.binding[0], s.binding[1], s.binding[2], s.binding[3], s.binding[4] = term, kept, fitting, 0, 0
    return max(best, value)
