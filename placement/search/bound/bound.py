"""A lower bound on every completion of a partial plan, compiled: under `graph_order` for any order of its nodes.

Two nodes *exclude* each other if they occupy a common resource, if both load a model on a common device and offload it
afterwards, if one of them leaves no room for a model that comes, or if the first must end before the second starts.
Under `ready_first` the rule also orders nodes that share devices (`precedence`). If some nodes of a set exclude each
other, the set needs at least the time (*) of `exclusive_work`. Undecided calls enter with their smallest duration and
area, and no overlap, so a bound of a partial plan holds for all its completions. For the period of a long run see
`period`. For the makespan M of N iterations (*) is used three times:

1. all iterations together, if K's nodes exclude each other in any two iterations:
   M >= head + N * (*) + tail; head and tail are the shortest times before the first and after the last of K and A.
2. a cycle through the iterations, and 3. the nodes after it in the last iteration: see `cycles`.

tests/placement/search/test_bound.py compares the bound with every plan of random problems, in random orders too.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.cycles import cycle_bound
from prefect_rlhf.placement.search.bound.exclusion import fill_conflicts
from prefect_rlhf.placement.search.bound.exclusive_work import heaviest_work, rounded_up
from prefect_rlhf.placement.search.bound.period import period_bound
from prefect_rlhf.placement.search.bound.precedence import exclude_always_in_order, fill_order
from prefect_rlhf.placement.search.bound.scratch import ALL_ITERATIONS, Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.tables.tables import COMPUTE, GRAPH_ORDER, LINK, PAIR, Tables


@inner
def fill_areas(t: Tables, option: Ints, least_area: Ints, least_size: Ints, us: Ints, area: Ints) -> None:
    """Write the area of each node: microseconds times the fewest devices that it can occupy.

    `least_area` and `least_size` are the values of the undecided calls.
    """
    for node in range(t.num_nodes):
        first = t.first[node]
        if t.node_kind[node] == LINK or t.node_kind[node] == COMPUTE:
            area[node] = 0
        elif t.node_kind[node] == PAIR:
            area[node] = us[node] * pair_size(t, option, least_size, node)
        elif option[first] >= 0:
            area[node] = us[node] * call_size(t, option, least_size, first)
        else:
            area[node] = least_area[first]


@inner
def call_size(t: Tables, option: Ints, least_size: Ints, call: int) -> int:
    """Devices of a call's mesh; the fewest possible if it is undecided."""
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
def fill_heads_and_tails(t: Tables, us: Ints, head: Ints, tail: Ints) -> None:
    """Write the critical path to each node within its iteration, and the critical path after its end."""
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
def present(us: Ints) -> int:
    """The set of nodes that take time."""
    members = 0
    for node in range(len(us)):
        if us[node] > 0:
            members |= 1 << node
    return members


@inner
def bound_of(t: Tables, us: Ints, absent: int, overlap: Ints, s: Scratch, enough: int) -> int:
    """Microseconds that no schedule is below. Stops at the first of its terms to reach `enough`.

    `absent` are nodes that surely take no time (`surely_absent`); `s.area` is filled by `fill_areas`, `s.crowded` by
    `fill_crowded`. Writes the binding term into `s.binding`: ALL_ITERATIONS, or CYCLE + number of the anchor; K and A
    of all iterations or of the cycle; K and A of the last iteration after the cycle. For LOOP: the loop, the nodes that
    exclude it in every iteration, and its iterations.
    """
    fill_conflicts(t, us, overlap, s.crowded, s.by_resource, s.conflict)
    nodes = present(us)
    if t.rule == GRAPH_ORDER:
        return period_bound(t, us, s, nodes, enough)
    fill_heads_and_tails(t, us, s.head, s.tail)
    fill_order(t, s.conflict, nodes, absent, s.order)
    best = number = 0
    lag = t.anchor_lag[0]
    while best < enough and number < len(t.anchor):
        best = max(best, cycle_bound(t, us, s, nodes, number, lag, best))
        if lag > 1:
            lag = 1
        else:
            number += 1
            lag = t.anchor_lag[number] if number < len(t.anchor) else 0
    return best if best >= enough else max(best, all_iterations_bound(t, us, s, nodes, best))


@inner
def all_iterations_bound(t: Tables, us: Ints, s: Scratch, nodes: int, best: int) -> int:
    """Term 1. Writes the binding nodes if the bound is above `best`."""
    exclude_always_in_order(t, s.conflict, s.order, s.adjacent)
    work, kept, fitting = heaviest_work(us, s.area, s, nodes, t.num_devices)
    ends = least_over(s.head, kept | fitting) + least_over(s.tail, kept | fitting)
    value = ends + rounded_up(t.iterations * work, t.num_devices)
    if value > best:
        s.binding[0], s.binding[1], s.binding[2], s.binding[3], s.binding[4] = ALL_ITERATIONS, kept, fitting, 0, 0
    return value
