"""A lower bound on the makespan of every schedule of every completion of a partial plan, compiled.

Two nodes *exclude* each other when they occupy something in common, or when one must wait for the other, or for what
goes first on devices that it needs (`precedence`). A set of nodes
that exclude each other pairwise (a clique) runs one after the other. So while a clique K runs, nothing runs that all of
K excludes; if A is a set of such nodes, the time besides K must have room for the area of A: each node's duration
times the devices that it occupies. With D devices,

    seconds >= weight(K) + area(A) / D                                                                    (*)

Undecided calls enter with their smallest duration and area, and no overlap, so a bound of a partial plan holds for all
its completions. (*) is used three times, with the makespan M of N iterations:

1. all iterations together, where K's nodes exclude each other in whatever iterations they run:
   M >= head + N * (*) + tail; head and tail are the shortest times before the first and after the last of K and A.
2. a loop: an anchor whose next run, `lag` iterations on, waits for itself. Between the two lie nodes that run after the
   one and before the other: start of the next >= start of this + (*) over them. Nodes that may slip beyond the next run
   of the anchor, but not beyond the one after that, lie between its first and its last run all but once.
3. what runs after the anchor in the last iteration: M >= start of the anchor's last run + (*) over it.

tests/placement/search/test_bound.py holds all of this against every plan of random problems.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.cliques import STACK, heaviest_clique, sum_over
from prefect_rlhf.placement.search.compiled import inner, lowest
from prefect_rlhf.placement.search.precedence import (
    Order,
    exclude_always,
    exclude_once,
    fill_order,
    members_after,
    order_for,
    united,
)
from prefect_rlhf.placement.search.tables import LINK, PAIR, Ints, Tables

ALL_ITERATIONS, LOOP = 0, 1


class Scratch(NamedTuple):
    """Room for what a bound needs on its way; allocated once, since that takes as long as the bound itself."""

    head: Ints  # [V]
    tail: Ints  # [V]
    conflict: Ints  # [V]
    adjacent: Ints  # [V]
    total_us: Ints  # [V]: of several runs
    total_area: Ints  # [V]
    order: Order
    by_resource: Ints  # [2 C]
    stack: Ints  # [STACK], of `heaviest_clique`


def scratch_for(t: Tables) -> Scratch:
    """Empty arrays of the right sizes."""
    head, tail, conflict, adjacent, total_us, total_area = np.zeros((6, t.num_nodes), dtype=np.int64)
    by_resource, stack = np.zeros(2 * t.num_calls, dtype=np.int64), np.zeros(STACK, dtype=np.int64)
    return Scratch(head, tail, conflict, adjacent, total_us, total_area, order_for(t), by_resource, stack)


@inner
def fill_areas(t: Tables, option: Ints, least_area: Ints, least_size: Ints, us: Ints, area: Ints) -> None:
    """Write each node's area: microseconds times the fewest devices that it can occupy.

    `least_area` and `least_size` are those of the undecided calls.
    """
    for node in range(t.num_nodes):
        first = t.first[node]
        if t.kind[node] == LINK:
            area[node] = 0
        elif t.kind[node] == PAIR:
            area[node] = us[node] * pair_size(t, option, least_size, node)
        elif option[first] >= 0:
            area[node] = us[node] * call_size(t, option, least_size, first)
        else:
            area[node] = least_area[first]


@inner
def call_size(t: Tables, option: Ints, least_size: Ints, call: int) -> int:
    """Devices of a call's mesh; the fewest possible where it is undecided."""
    if option[call] < 0:
        return least_size[call]
    return t.class_size[t.option_class[t.option_start[call] + option[call]]]


@inner
def pair_size(t: Tables, option: Ints, least_size: Ints, node: int) -> int:
    """Devices of the mesh or meshes that a pair node occupies, at least."""
    first, second = t.first[node], t.second[node]
    size_first = call_size(t, option, least_size, first)
    size_second = call_size(t, option, least_size, second)
    if t.resources[node] == 1 << first:
        return size_first
    if t.resources[node] == 1 << second:
        return size_second
    return max(size_first, size_second)


@inner
def fill_conflicts(t: Tables, overlap: Ints, by_resource: Ints, conflict: Ints) -> None:
    """Write for each node the set of nodes that occupy something in common with it (itself among them)."""
    for call in range(t.num_calls):
        by_resource[call] = by_resource[call + t.num_calls] = 0
        others = overlap[call]
        while others:
            other = lowest(others)
            others &= others - 1
            by_resource[call] |= t.nodes_of[other]
            by_resource[call + t.num_calls] |= t.nodes_of[other + t.num_calls]
    for node in range(t.num_nodes):
        conflict[node] = 0
        resources = t.resources[node]
        while resources:
            conflict[node] |= by_resource[lowest(resources)]
            resources &= resources - 1


@inner
def fill_heads_and_tails(t: Tables, us: Ints, head: Ints, tail: Ints) -> None:
    """Write the longest way to each node within its iteration, and the longest way after its end."""
    for node in range(t.num_nodes):
        head[node] = tail[node] = 0
    for node in range(t.num_nodes):
        for edge in range(t.edge_start[node], t.edge_start[node + 1]):
            if t.edge_lag[edge] == 0:
                head[t.edge_target[edge]] = max(head[t.edge_target[edge]], head[node] + us[node])
    for node in range(t.num_nodes - 1, -1, -1):
        for edge in range(t.edge_start[node], t.edge_start[node + 1]):
            if t.edge_lag[edge] == 0:
                tail[node] = max(tail[node], tail[t.edge_target[edge]] + us[t.edge_target[edge]])


@inner
def least_over(values: Ints, members: int) -> int:
    """The smallest of the members' values; 0 for no members."""
    if members == 0:
        return 0
    least = values[lowest(members)]
    while members:
        least = min(least, values[lowest(members)])
        members &= members - 1
    return least


@inner
def best_split(
    adjacent: Ints, us: Ints, area: Ints, clique: int, universe: int, num_devices: int
) -> tuple[int, int, int]:
    """The best of (*) that the clique gives: K of it, and as A the rest of it with what only the rest does not exclude.

    Returns device-microseconds, K and A.
    """
    best, best_k, best_a = sum_over(us, clique) * num_devices, clique, 0
    whole = sum_over(area, universe)
    if whole > best:
        best, best_k, best_a = whole, 0, universe
    others = universe & ~clique
    while others:
        beside = clique & ~adjacent[lowest(others)]  # what may run at the same time as this node
        others &= others - 1
        kept = clique & ~beside
        fitting = beside
        rest = universe & ~clique
        while rest:
            if kept & ~adjacent[lowest(rest)] == 0:
                fitting |= 1 << lowest(rest)
            rest &= rest - 1
        value = sum_over(us, kept) * num_devices + sum_over(area, fitting)
        if value > best:
            best, best_k, best_a = value, kept, fitting
    return best, best_k, best_a


@inner
def rounded_up(value: int, divisor: int) -> int:
    """`value / divisor`, not below it."""
    return (value + divisor - 1) // divisor


@inner
def present(us: Ints) -> int:
    """The set of nodes that take time."""
    members = 0
    for node in range(len(us)):
        if us[node] > 0:
            members |= 1 << node
    return members


@inner
def bound_of(t: Tables, us: Ints, area: Ints, gone: int, overlap: Ints, s: Scratch, enough: int, explain: Ints) -> int:
    """Microseconds below which no schedule ends. Stops at the first of its terms to reach `enough`.

    `gone` are the nodes that surely take no time.

    Writes what binds into `explain`: the term (ALL_ITERATIONS, or LOOP + number of the anchor), K and A of all
    iterations or of the loop, K and A of what follows the loop.
    """
    fill_heads_and_tails(t, us, s.head, s.tail)
    fill_conflicts(t, overlap, s.by_resource, s.conflict)
    nodes = present(us)
    fill_order(t, s.conflict, nodes, gone, s.order)
    best = number = 0
    lag = t.anchor_lag[0]
    while best < enough and number < len(t.anchor):
        best = max(best, loop_bound(t, us, area, s, nodes, number, lag, explain, best))
        if lag > 1:
            lag = 1
        else:
            number += 1
            lag = t.anchor_lag[number] if number < len(t.anchor) else 0
    return best if best >= enough else max(best, all_iterations_bound(t, us, area, s, nodes, explain, best))


@inner
def heaviest_work(us: Ints, area: Ints, s: Scratch, nodes: int, num_devices: int) -> tuple[int, int, int]:
    """(*) over `nodes`, of which `s.adjacent` says which exclude each other: device-microseconds, K and A."""
    _, clique = heaviest_clique(s.adjacent, us, nodes, s.stack)
    return best_split(s.adjacent, us, area, clique, nodes, num_devices)


@inner
def all_iterations_bound(t: Tables, us: Ints, area: Ints, s: Scratch, nodes: int, explain: Ints, best: int) -> int:
    """Term 1."""
    exclude_always(t, s.conflict, s.order, s.adjacent)
    work, kept, fitting = heaviest_work(us, area, s, nodes, t.num_devices)
    ends = least_over(s.head, kept | fitting) + least_over(s.tail, kept | fitting)
    value = ends + rounded_up(t.iterations * work, t.num_devices)
    if value > best:
        explain[0], explain[1], explain[2], explain[3], explain[4] = ALL_ITERATIONS, kept, fitting, 0, 0
    return value


@inner
def loop_bound(
    t: Tables, us: Ints, area: Ints, s: Scratch, nodes: int, number: int, lag: int, explain: Ints, best: int
) -> int:
    """Terms 2 and 3 for one anchor whose next run, `lag` iterations on, waits for it or goes after it."""
    anchor = t.anchor[number]
    rest = loop = 1 << anchor
    if lag == t.anchor_lag[number]:
        rest, loop = t.anchor_rest[number], t.anchor_loop[number]
    slips = 0
    if lag == 1:
        rest |= members_after(s.order.same, anchor)
        loop |= rest & s.order.last[anchor]
        slips = rest & nodes & united(s.order.last, s.order.last[anchor]) & ~loop
    exclude_once(t, s.conflict, s.order, s.adjacent)
    work, last_kept, last_fitting = heaviest_work(us, area, s, rest & nodes, t.num_devices)
    value = s.head[anchor] + rounded_up(work, t.num_devices)
    repeats = (t.iterations - 1) // lag
    kept = fitting = 0
    if repeats:
        if lag > 1:
            for node in range(t.num_nodes):
                s.adjacent[node] = s.conflict[node] | t.loop_ordered[number, node]
        if slips:
            exclude_slips(s.conflict, s.order, slips, s.adjacent)
            fill_total(us, loop & nodes, slips, repeats, s.total_us)
            fill_total(area, loop & nodes, slips, repeats, s.total_area)
            work, kept, fitting = heaviest_work(s.total_us, s.total_area, s, (loop | slips) & nodes, t.num_devices)
            value += rounded_up(work, t.num_devices)
            if fitting | last_fitting == 0:
                value += sum_over(us, apart_from(s.conflict, s.order, kept & slips, last_kept))
        else:
            work, kept, fitting = heaviest_work(us, area, s, loop & nodes, t.num_devices)
            value += repeats * rounded_up(work, t.num_devices)
    if value > best:
        explain[0], explain[1], explain[2], explain[3], explain[4] = (
            LOOP + number,
            kept,
            fitting,
            last_kept,
            last_fitting,
        )
    return value


@inner
def fill_total(one: Ints, loop: int, slips: int, repeats: int, total: Ints) -> None:
    """Write what all runs take that end before the anchor's last: one run fewer of those that slip."""
    for node in range(len(one)):
        total[node] = 0
        if loop >> node & 1:
            total[node] = repeats * one[node]
        elif slips >> node & 1:
            total[node] = (repeats - 1) * one[node]


@inner
def exclude_slips(conflict: Ints, o: Order, slips: int, adjacent: Ints) -> None:
    """Of what excludes a node that slips within an iteration, keep what excludes it in the next iteration as well."""
    rest = slips
    while rest:
        node = lowest(rest)
        rest &= rest - 1
        kept = conflict[node] | members_after(o.last, node)
        adjacent[node] &= kept
        others = ~kept & (1 << len(conflict)) - 1
        while others:
            adjacent[lowest(others)] &= ~(1 << node)
            others &= others - 1


@inner
def apart_from(conflict: Ints, o: Order, nodes: int, last: int) -> int:
    """Those of `nodes` whose last run but one excludes the last runs of all of `last`."""
    found = 0
    while nodes:
        node = lowest(nodes)
        nodes &= nodes - 1
        if last & ~(conflict[node] | members_after(o.last, node)) == 0:
            found |= 1 << node
    return found
