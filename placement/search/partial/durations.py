"""Durations of nodes, compiled."""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import Ints, inner
from prefect_rlhf.placement.search.tables.tables import CALL, COMPUTE, LINK, UNDECIDED, Tables


@inner
def fill_durations(t: Tables, option: Ints, relation: Ints, least_us: Ints, us: Ints) -> None:
    """Write each node's duration in microseconds: the smallest possible if the plan is undecided.

    `least_us` are the durations of the undecided calls.
    """
    for node in range(t.num_nodes):
        a, b = option[t.first[node]], option[t.second[node]]
        if t.node_kind[node] == CALL:
            us[node] = t.cost[t.cost_start[node] + a] if a >= 0 else least_us[t.first[node]]
        elif t.node_kind[node] == LINK:
            us[node] = t.cost[t.cost_start[node] + a] if a >= 0 else t.least_cost[node]
        elif t.node_kind[node] == COMPUTE:
            us[node] = t.least_cost[node]
        elif a >= 0 and b >= 0:
            us[node] = pair_duration(t, node, a, b, relation[t.first[node], t.second[node]])
        elif a >= 0:
            us[node] = t.least_by_first[t.row_start[node] + a]
        elif b >= 0:
            us[node] = t.least_by_second[t.column_start[node] + b]
        else:
            us[node] = t.least_cost[node]


@inner
def pair_duration(t: Tables, node: int, a: int, b: int, relation: int) -> int:
    """A pair node's time in microseconds, if its calls have options a and b."""
    row, column = t.row[t.row_start[node] + a], t.column[t.column_start[node] + b]
    at = t.cost_start[node] + row * t.cost_columns[node] + column
    if t.cost_layers[node] == 1:
        return t.cost[at]
    layer = (t.cost_start[node + 1] - t.cost_start[node]) // 3
    if relation != UNDECIDED:
        return t.cost[at + relation * layer]
    return min(t.cost[at], t.cost[at + layer], t.cost[at + 2 * layer])
