"""A complete plan in the compiled part: an option and a mesh for each call, its cost, the best change of one call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.compiled import compiled, inner
from prefect_rlhf.placement.search.lay_out import has_room, relation_of
from prefect_rlhf.placement.search.simulate import Agenda, agenda_for, fill_durations, list_schedule
from prefect_rlhf.placement.search.tables import DISJOINT, EQUAL, OVERLAP, Ints, Tables

OVERFLOW_FACTOR = 3  # a plan that overflows memory counts as so many times as long (ReaL, section 5.2)


class Placed(NamedTuple):
    """Arrays are changed in place."""

    option: Ints  # [C]
    mesh: Ints  # [C]
    relation: Ints  # [C, C]: scratch, as all below
    overlap: Ints  # [C]
    us: Ints  # [V]
    order: Ints  # [C]
    patterns: Ints  # [meshes]
    agenda: Agenda


def empty_placed(t: Tables) -> Placed:
    """Each call's first option on the first mesh of its class."""
    option = np.zeros(t.num_calls, dtype=np.int64)
    classes = [t.option_class[t.option_start[call]] for call in range(t.num_calls)]
    return Placed(
        option=option,
        mesh=np.array([t.class_mesh[t.class_start[found]] for found in classes], dtype=np.int64),
        relation=np.zeros((t.num_calls, t.num_calls), dtype=np.int64),
        overlap=np.zeros(t.num_calls, dtype=np.int64),
        us=np.zeros(t.num_nodes, dtype=np.int64),
        order=np.arange(t.num_calls, dtype=np.int64),
        patterns=np.zeros(len(t.mesh_start), dtype=np.int64),
        agenda=agenda_for(t),
    )


@compiled
def evaluate(t: Tables, p: Placed) -> int:
    """The makespan in microseconds, OVERFLOW_FACTOR times that when a device overflows; starts are in `p.agenda`."""
    for a in range(t.num_calls):
        p.overlap[a] = 0
        for b in range(t.num_calls):
            relation = relation_of(t, p.mesh[a], p.mesh[b])
            p.relation[a, b] = OVERLAP if relation == EQUAL and not t.tells_equal[a, b] else relation
            if relation != DISJOINT:
                p.overlap[a] |= 1 << b
    fill_durations(t, p.option, p.relation, p.us)
    makespan = list_schedule(t, p.us, p.overlap, p.agenda)
    return makespan if fits(t, p) else OVERFLOW_FACTOR * makespan


@compiled
def fits(t: Tables, p: Placed) -> bool:
    """Whether every device has memory enough."""
    for call in range(t.num_calls):  # noqa: SIM110 - no generators in compiled code
        if not has_room(t, p.order, call, p.option, p.mesh):
            return False
    return True


@inner
def pattern(t: Tables, p: Placed, call: int, mesh: int) -> int:
    """How a mesh would lie to those of the other calls; equal patterns on one class cost the same."""
    found = 0
    for other in range(t.num_calls):
        if other != call:
            found = found * 3 + relation_of(t, mesh, p.mesh[other])
    return found


@inner
def new_pattern(t: Tables, p: Placed, call: int, place: int) -> bool:
    """Whether the mesh at `place` of its class lies otherwise than all before it in the class. Remembers it."""
    start = 0
    while t.class_start[start + 1] <= place:
        start += 1
    p.patterns[place - t.class_start[start]] = pattern(t, p, call, t.class_mesh[place])
    for index in range(place - t.class_start[start]):
        if p.patterns[index] == p.patterns[place - t.class_start[start]]:
            return False
    return True


@compiled
def improve_call(t: Tables, p: Placed, call: int, cost: int) -> tuple[int, int]:
    """Give `call` the option and mesh that are best as all others are. Returns the cost, and how many were tried.

    `cost` is what the plan costs now; of equally good alternatives the earlier stays.
    """
    tried = 0
    best_option, best_mesh = p.option[call], p.mesh[call]
    for found in range(len(t.class_size)):
        for place in range(t.class_start[found], t.class_start[found + 1]):
            if not new_pattern(t, p, call, place):
                continue
            p.mesh[call] = t.class_mesh[place]
            for option in range(t.option_start[call + 1] - t.option_start[call]):
                if t.option_class[t.option_start[call] + option] != found:
                    continue
                p.option[call] = option
                tried += 1
                value = evaluate(t, p)
                if value < cost:
                    cost, best_option, best_mesh = value, option, t.class_mesh[place]
    p.option[call], p.mesh[call] = best_option, best_mesh
    return cost, tried
