"""The nodes that can never run at the same time, compiled.

The reasons are common resources, models that visit the same device in sequence, calls that leave no room for a visit,
and dependencies. Scheduling rules are not used, so the result holds for every schedule.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.scratch import Crowd
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.tables.tables import LINK, Tables


@inner
def visitors(t: Tables, us: Ints) -> int:
    """The set of calls whose model visits its devices: a link node of the call takes time."""
    calls = 0
    for node in range(t.num_nodes):
        if t.node_kind[node] == LINK and us[node] > 0:
            calls |= 1 << t.first[node]
    return calls


@inner
def in_reach(t: Tables, resources: int, overlap: Ints) -> int:
    """All resources that may not be in use while `resources` are. `overlap[c]`: calls on meshes that overlap c's."""
    reached = 0
    while resources:
        bit = lowest(resources)
        resources &= resources - 1
        reached |= overlap[bit] if bit < t.num_calls else overlap[bit - t.num_calls] << t.num_calls
    return reached


@inner
def fill_conflicts(t: Tables, us: Ints, overlap: Ints, crowd: Crowd, by_resource: Ints, conflict: Ints) -> None:
    """Write for each node the set of nodes that never run concurrently with it.

    They occupy a common resource, or are visits of other roles to a common device, or a call and the visits that find
    no room beside it, or a late visit and everything that its devices compute. A node that occupies a resource is in
    its own set.
    """
    for call in range(t.num_calls):
        by_resource[call] = by_resource[call + t.num_calls] = 0
        others = overlap[call]
        while others:
            other = lowest(others)
            others &= others - 1
            by_resource[call] |= t.nodes_of[other]
            by_resource[call + t.num_calls] |= t.nodes_of[other + t.num_calls]
            if crowd.late[0] >> other & 1:
                by_resource[call] |= t.visit_nodes[other]
    for node in range(t.num_nodes):
        conflict[node] = 0
        resources = occupied(t, node, crowd.late[0])
        while resources:
            conflict[node] |= by_resource[lowest(resources)]
            resources &= resources - 1
    for call in range(t.num_calls):
        alone = 0
        others = overlap[call] & crowd.apart[call]
        while others:
            alone |= t.visit_nodes[lowest(others)]
            others &= others - 1
        members = t.visit_nodes[call] if alone else 0
        while members:
            conflict[lowest(members)] |= alone
            members &= members - 1
    exclude_crowded(t, crowd.beside, conflict)
    exclude_in_order(t, overlap, crowd, conflict)


@inner
def occupied(t: Tables, node: int, late: int) -> int:
    """The resources of a node. The link nodes of a late visit occupy what their devices compute with, too."""
    call = t.first[node]
    return t.resources[node] | (late & 1 << call if t.node_kind[node] == LINK else 0)


@inner
def exclude_crowded(t: Tables, crowded: Ints, conflict: Ints) -> None:
    """Let each call exclude the visits that find no room on its devices."""
    for call in range(t.num_calls):
        others = crowded[call]
        while others:
            exclude_all(1 << t.node_of[call], t.visit_nodes[lowest(others)], conflict)
            others &= others - 1


@inner
def exclude_in_order(t: Tables, overlap: Ints, crowd: Crowd, conflict: Ints) -> None:
    """Let the moves over the host link keep the order of their calls (`visits_after`).

    *Proof.* Let the visits of calls x and y exclude each other on a common device, x's first. So all of the visit with
    this run of x lies before the visit with this run of y. Hence x's offload and y's reload run between x and y, and
    never at the same time as a node that always runs before x or behind y. A reallocation to y's copy needs that copy
    on its devices, so x's offload also precedes it if it waits for x. If only x, or only y, must not run during the
    other's visit, the same holds for the reload, or the offload, of that visit.
    """
    for first in range(t.num_calls):
        for second in range(t.num_calls):
            apart = overlap[first] & crowd.apart[first] & 1 << second != 0
            if apart or crowd.beside[first] >> second & 1:
                reload = t.visit_nodes[second] & (1 << t.node_of[second]) - 1
                exclude_all(reload, t.around[0, first, second], conflict)
            if apart or crowd.beside[second] >> first & 1:
                offload = t.visit_nodes[first] & ~((2 << t.node_of[first]) - 1)
                beyond = t.around[1, first, second] if apart else 0
                exclude_all(offload, t.around[0, first, second] | beyond, conflict)


@inner
def exclude_all(nodes: int, others: int, conflict: Ints) -> None:
    """Let each of some nodes exclude each of others, but not itself."""
    while nodes:
        node = lowest(nodes)
        nodes &= nodes - 1
        conflict[node] |= others
        remaining = others
        while remaining:
            conflict[lowest(remaining)] |= 1 << node
            remaining &= remaining - 1


@inner
def exclude_always(t: Tables, conflict: Ints, adjacent: Ints) -> None:
    """Write for each node the nodes whose runs exclude its runs in any two iterations."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_always[node]


@inner
def exclude_in_cycle(t: Tables, conflict: Ints, number: int, adjacent: Ints) -> None:
    """Write for each node the nodes that it excludes between two runs of an anchor."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.cycle_ordered[number, node]
