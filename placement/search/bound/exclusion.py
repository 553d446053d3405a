"""Which nodes can never run at the same time, compiled: by what they occupy, and by waiting for each other.

No rule of scheduling has a say, so what follows from it holds for every schedule.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.tables.tables import Tables


@inner
def fill_conflicts(t: Tables, overlap: Ints, by_resource: Ints, conflict: Ints) -> None:
    """Write for each node the set of nodes that occupy something in common with it, itself included."""
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
def exclude_once(t: Tables, conflict: Ints, adjacent: Ints) -> None:
    """Write for each node those that it excludes within an iteration."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_once[node]


@inner
def exclude_always(t: Tables, conflict: Ints, adjacent: Ints) -> None:
    """Write for each node those of which every run excludes every run of it."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.ordered_always[node]


@inner
def exclude_in_cycle(t: Tables, conflict: Ints, number: int, adjacent: Ints) -> None:
    """Write for each node those that it excludes between two runs of an anchor."""
    for node in range(t.num_nodes):
        adjacent[node] = conflict[node] | t.cycle_ordered[number, node]
