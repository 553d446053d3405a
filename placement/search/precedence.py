"""Which nodes run after which, for certain: because they wait, or because of two on the same devices one goes first."""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import inner, lowest
from prefect_rlhf.placement.search.tables import Ints, Tables


@inner
def fill_after(t: Tables, conflict: Ints, nodes: int, same: Ints, following: Ints) -> None:
    """Write for each node the sets of nodes that start after its end: in its own iteration, and in the next.

    `nodes` are those that take time; only they hold up what conflicts with them.
    """
    for node in range(t.num_nodes - 1, -1, -1):
        direct = goes_before(t, conflict, nodes, 0, node)
        same[node] = direct | united(same, direct)
    for node in range(t.num_nodes - 1, -1, -1):
        direct = goes_before(t, conflict, nodes, 1, node)
        following[node] = direct | united(same, direct) | united(following, goes_before(t, conflict, nodes, 0, node))


@inner
def goes_before(t: Tables, conflict: Ints, nodes: int, shift: int, node: int) -> int:
    """The nodes `shift` iterations later that wait for the node, or conflict with it and come after it."""
    found = t.waits_in[shift, node]
    if nodes >> node & 1:
        found |= conflict[node] & nodes & t.goes_first[shift, node]
    return found


@inner
def united(sets: Ints, members: int) -> int:
    """The union of the members' sets."""
    found = 0
    while members:
        found |= sets[lowest(members)]
        members &= members - 1
    return found


@inner
def members_before(following: Ints, members: int, node: int) -> int:
    """Those of a set that run before the node's next run."""
    found = 0
    while members:
        if following[lowest(members)] >> node & 1:
            found |= 1 << lowest(members)
        members &= members - 1
    return found


@inner
def exclude_once(t: Tables, conflict: Ints, same: Ints, adjacent: Ints) -> None:
    """Write for each node those that it excludes within an iteration."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_once[node] | same[node]
    mirror(adjacent)


@inner
def exclude_always(t: Tables, conflict: Ints, same: Ints, following: Ints, adjacent: Ints) -> None:
    """Write for each node those of which every run excludes every run of it."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_always[node] | members_before(following, same[node], node)
    mirror(adjacent)


@inner
def mirror(adjacent: Ints) -> None:
    """Let each node be adjacent to those that are adjacent to it."""
    for node in range(len(adjacent)):
        others = adjacent[node]
        while others:
            adjacent[lowest(others)] |= 1 << node
            others &= others - 1
