"""A lower bound on a cycle through the iterations, by ReaL's rule, compiled.

An anchor is a node that waits for its own run `lag` iterations before. The nodes of its cycle run after the anchor's
run and before its next run, so the next run starts at least (*) over them later. A node slips if it may run after the
anchor's next run, but not after the run that follows. Between the anchor's first and last run, slipping nodes lack at
most a single run. After the anchor's last run, (*) over the nodes that follow it in that iteration is added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.bound.cliques import sum_over
from prefect_rlhf.placement.search.bound.exclusion import exclude_in_cycle
from prefect_rlhf.placement.search.bound.exclusive_work import heaviest_work, rounded_up
from prefect_rlhf.placement.search.bound.scratch import CYCLE, Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest, word
from prefect_rlhf.placement.search.problem import Problem
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.rules.precedence import (
    Order,
    exclude_once_in_order,
    members_after,
    order_for,
    united,
)
from prefect_rlhf.placement.search.tables.dependencies import (
    NEVER,
    anchors_of,
    direct_dependencies,
    least_lags,
)
from prefect_rlhf.placement.search.tables.tables import Tables


@dataclass(frozen=True, slots=True, eq=False)
class Cycles(Record):
    """The order of runs, the nodes behind each anchor, and scratch for a bound."""

    order: Order
    followers: Ints  # [A]: the anchor and all that waits for it in its iteration
    head: Ints  # [V]: microseconds before it within its iteration
    total_us: Ints  # [V]: of several runs
    total_area: Ints  # [V]


def cycles_for(problem: Problem, iterations: int) -> Cycles:
    """Return the cycles of a problem, and room for a bound."""
    lags = least_lags(direct_dependencies(problem))
    followers = np.array([word(_followers(lags, anchor)) for anchor in anchors_of(lags, iterations)], dtype=np.int64)
    head, total_us, total_area = np.zeros((3, len(problem.nodes)), dtype=np.int64)
    return Cycles(order_for(problem), followers, head, total_us, total_area)


def _followers(lags: Ints, anchor: int) -> list[bool]:
    """The anchor and all that waits for it in its iteration; all nodes when there is no cycle to be the anchor of."""
    if lags[anchor, anchor] == NEVER:
        return [True] * len(lags)
    return [bool(node == anchor or lags[anchor, node] == 0) for node in range(len(lags))]


@inner
def cycle_bound(c: Cycles, t: Tables, us: Ints, s: Scratch, nodes: int, number: int, lag: int, best: int) -> int:
    """Microseconds until all iterations have ended, for an anchor; `nodes` take time, and `c.order` is filled.

    Writes the binding term if the bound is above `best`. A node's runs follow each other, so `lag` is 1 or the
    anchor's.
    """
    anchor, repeats = t.anchor[number], (t.iterations - 1) // lag
    after, cycle, slips = around(c, t, number, lag)
    after, cycle, slips = after & nodes, cycle & nodes, slips & nodes
    exclude_once_in_order(t, s.conflict, c.order, s.adjacent)
    work, last_kept, last_fitting = heaviest_work(us, s.area, s, after, t.num_devices)
    value = c.head[anchor] + rounded_up(work, t.num_devices)
    kept = fitting = 0
    if repeats and slips:
        between, kept, fitting = work_with_slips(c, us, s, cycle, slips, repeats, t.num_devices)
        value += between
        if fitting | last_fitting == 0:
            value += sum_over(us, exclusive_before(s.conflict, c.order, kept & slips, last_kept))
    elif repeats:
        if lag > 1:
            exclude_in_cycle(t, s.conflict, number, s.adjacent)
        work, kept, fitting = heaviest_work(us, s.area, s, cycle, t.num_devices)
        value += repeats * rounded_up(work, t.num_devices)
    if value > best:
        s.binding[0], s.binding[1], s.binding[2] = CYCLE + number, kept, fitting
        s.binding[3], s.binding[4] = last_kept, last_fitting
    return value


@inner
def around(c: Cycles, t: Tables, number: int, lag: int) -> tuple[int, int, int]:
    """The nodes after an anchor; of these, the nodes before its next run; and the nodes that slip."""
    anchor = t.anchor[number]
    after = cycle = 1 << anchor
    if lag == t.anchor_lag[number]:
        after, cycle = c.followers[number], t.anchor_cycle[number]
    if lag > 1:
        return after, cycle, 0
    after |= members_after(c.order.same, anchor)
    cycle |= after & c.order.last[anchor]
    return after, cycle, after & united(c.order.last, c.order.last[anchor]) & ~cycle


@inner
def work_with_slips(
    c: Cycles, us: Ints, s: Scratch, cycle: int, slips: int, repeats: int, num_devices: int
) -> tuple[int, int, int]:
    """Microseconds, K and A between the first and the last run of an anchor, when some nodes may slip."""
    exclude_slips(s.conflict, c.order, slips, s.adjacent)
    fill_total(us, cycle, slips, repeats, c.total_us)
    fill_total(s.area, cycle, slips, repeats, c.total_area)
    work, kept, fitting = heaviest_work(c.total_us, c.total_area, s, cycle | slips, num_devices)
    return rounded_up(work, num_devices), kept, fitting


@inner
def fill_total(per_run: Ints, cycle: int, slips: int, repeats: int, total: Ints) -> None:
    """Write the total of all runs that end before the anchor's last: a run fewer of slipping nodes."""
    for node in range(len(per_run)):
        total[node] = 0
        if cycle >> node & 1:
            total[node] = repeats * per_run[node]
        elif slips >> node & 1:
            total[node] = (repeats - 1) * per_run[node]


@inner
def exclude_slips(conflict: Ints, o: Order, slips: int, adjacent: Ints) -> None:
    """Of the nodes that exclude a slipping node within an iteration, keep those that also exclude it in the next."""
    remaining = slips
    while remaining:
        node = lowest(remaining)
        remaining &= remaining - 1
        kept = conflict[node] | members_after(o.last, node)
        adjacent[node] &= kept
        others = ~kept & (1 << len(conflict)) - 1
        while others:
            adjacent[lowest(others)] &= ~(1 << node)
            others &= others - 1


@inner
def exclusive_before(conflict: Ints, o: Order, nodes: int, last: int) -> int:
    """The subset of `nodes` whose penultimate run excludes the last runs of all of `last`."""
    exclusive = 0
    while nodes:
        node = lowest(nodes)
        nodes &= nodes - 1
        if last & ~(conflict[node] | members_after(o.last, node)) == 0:
            exclusive |= 1 << node
    return exclusive
