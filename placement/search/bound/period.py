"""A lower bound on the iteration time of a long run, for any order of its nodes, compiled.

It uses (*) of `exclusive_work` over many iterations: between two runs of an anchor, `lag` iterations apart, lie all
nodes of its cycle, so the period is at least (*) of these nodes over `lag`. If the lag is 1, nodes of the cycle that
wait for each other never run at the same time in any iterations. (*) of all nodes counts as well: with the exclusions
that always hold and, if the lag is 1, with the exclusions of the cycle.

With staleness a loop of dependencies may need several iterations (`loops`). Its nodes K run in sequence once in `lag`
iterations. Nodes Q that always exclude all of K and each other then run `lag` times, those of K once less:

    lag * seconds >= durations of K + lag * durations of Q outside K + (lag - 1) * durations of Q in K
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.cliques import sum_over
from prefect_rlhf.placement.search.bound.exclusion import exclude_always, exclude_in_cycle
from prefect_rlhf.placement.search.bound.exclusive_work import heaviest_work, rounded_up
from prefect_rlhf.placement.search.bound.scratch import ALL_ITERATIONS, CYCLE, LOOP, Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.tables.dependencies import NEVER
from prefect_rlhf.placement.search.tables.tables import Tables


@inner
def period_bound(t: Tables, us: Ints, s: Scratch, nodes: int, enough: int) -> int:
    """Microseconds that no period is below; `nodes` take time. Stops at the first term that reaches `enough`.

    `s.conflict` and `s.area` are filled. Writes the binding term.
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
    if best >= enough:
        return best
    exclude_always(t, s.conflict, s.adjacent)
    for number in range(len(t.loops)):
        best = max(best, loop_bound(t, us, s, nodes, number, best))
    return best if all_counted or best >= enough else larger_of(t, us, s, nodes, ALL_ITERATIONS, 1, best)


@inner
def loop_bound(t: Tables, us: Ints, s: Scratch, nodes: int, number: int, best: int) -> int:
    """The bound of a loop; `s.adjacent` are the nodes that always exclude each other. Writes the binding term."""
    members, lag = t.loops[number, 0] & nodes, t.loops[number, 1]
    work, alone = sum_over(us, members), 0
    others = nodes
    while others:
        node = lowest(others)
        others &= others - 1
        if (members | alone) & ~(1 << node) & ~s.adjacent[node] == 0:
            alone |= 1 << node
            work += (lag - (members >> node & 1)) * us[node]
    value = rounded_up(work, lag)
    if value > best:
        s.binding[0], s.binding[1], s.binding[2] = LOOP, members, alone & ~members
        s.binding[3], s.binding[4] = lag, 0
    return value


@inner
def larger_of(t: Tables, us: Ints, s: Scratch, members: int, term: int, lag: int, best: int) -> int:
    """The larger of the best bound and (*) over `members` for `lag` iterations. Writes the binding term if it is
    (*).
    """
    work, kept, fitting = heaviest_work(us, s.area, s, members, t.num_devices)
    value = rounded_up(work, t.num_devices * lag)
    if value > best:
        s.binding[0], s.binding[1], s.binding[2], s.binding[3], s.binding[4] = term, kept, fitting, 0, 0
    return max(best, value)
