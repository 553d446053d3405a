"""A lower bound on every completion of a partial plan, compiled.

Two nodes *exclude* each other if they occupy a common resource, if both load a model on a common device and offload it
afterwards, if either leaves no room for a model that comes, or if the first must end before the second starts. A rule
may add that it orders them. If some nodes of a set exclude each other, the set needs at least the time (*) of
`exclusive_work`. Undecided calls enter with their smallest duration and area, and no overlap, so a partial plan's bound
holds for all its completions. How this bounds a plan's time depends on the rule: the `period` of a long run for any
order of its nodes, or ReaL's makespan.

tests/placement/search/test_bound.py compares the bound with every plan of random problems, in random orders too.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.exclusion import fill_conflicts
from prefect_rlhf.placement.search.bound.scratch import Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner
from prefect_rlhf.placement.search.tables.tables import COMPUTE, LINK, PAIR, Tables


@inner
def fill_areas(t: Tables, option: Ints, least_area: Ints, least_size: Ints, us: Ints, area: Ints) -> None:
    """Write the area of each node: microseconds times the fewest devices that it can occupy.

    `least_area` and `least_size` are the values for undecided calls.
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
def present(us: Ints) -> int:
    """The set of nodes that take time."""
    members = 0
    for node in range(len(us)):
        if us[node] > 0:
            members |= 1 << node
    return members


@inner
def bound_of(t: Tables, option: Ints, relation: Ints, us: Ints, overlap: Ints, s: Scratch, enough: int) -> int:
    """Microseconds that no schedule by the rule beats. Stops at the first term that reaches `enough`.

    `s.area` is filled by `fill_areas`, `s.crowd` by `fill_crowd`. Writes the binding term into `s.binding`:
    ALL_ITERATIONS, or CYCLE + number of the anchor; K and A of all iterations or of the cycle; K and A of the last
    iteration after the cycle. For LOOP: the loop, the nodes that exclude it in every iteration, and its iterations. For
    IN_ORDER: K and A of the widest cycle.
    """
    fill_conflicts(t, us, overlap, s.crowd, s.by_resource, s.conflict)
    return t.rule.bound(t.rule, t, option, relation, us, overlap, s, enough)
