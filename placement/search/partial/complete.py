"""A complete plan in the compiled part: an option and a mesh for each call, its makespan, whether it fits."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.partial.fullest import beyond_fullest
from prefect_rlhf.placement.search.partial.list_schedule import Agenda, agenda_for, fill_durations, list_schedule
from prefect_rlhf.placement.search.partial.packing import load_of, relation_of
from prefect_rlhf.placement.search.tables.tables import DISJOINT, EQUAL, OVERLAP, Tables

OVERFLOW_FACTOR = 3  # a plan that overflows memory counts as so many times as long (ReaL, section 5.2)


class CompletePlan(NamedTuple):
    """Arrays are changed in place."""

    option: Ints  # [C]
    mesh: Ints  # [C]
    relation: Ints  # [C, C]: scratch, as all below
    overlap: Ints  # [C]
    us: Ints  # [V]
    order: Ints  # [C]
    agenda: Agenda


def empty_complete_plan(t: Tables) -> CompletePlan:
    """Each call's first option on the first mesh of its class."""
    option = np.zeros(t.num_calls, dtype=np.int64)
    classes = [t.option_class[t.option_start[call]] for call in range(t.num_calls)]
    return CompletePlan(
        option=option,
        mesh=np.array([t.class_mesh[t.class_start[found]] for found in classes], dtype=np.int64),
        relation=np.zeros((t.num_calls, t.num_calls), dtype=np.int64),
        overlap=np.zeros(t.num_calls, dtype=np.int64),
        us=np.zeros(t.num_nodes, dtype=np.int64),
        order=np.arange(t.num_calls, dtype=np.int64),
        agenda=agenda_for(t),
    )


@compiled
def evaluate(t: Tables, p: CompletePlan) -> int:
    """The makespan in microseconds, OVERFLOW_FACTOR times that when a device overflows; starts are in `p.agenda`."""
    makespan = makespan_of(t, p)
    return makespan if fits(t, p) else OVERFLOW_FACTOR * makespan


@compiled
def makespan_of(t: Tables, p: CompletePlan) -> int:
    """Microseconds, whether or not the plan fits."""
    fill_relations(t, p)
    return list_schedule(t, p.us, p.overlap, p.agenda)


@compiled
def fill_relations(t: Tables, p: CompletePlan) -> None:
    """Write how the meshes lie to each other, and how long each node then takes."""
    for a in range(t.num_calls):
        p.overlap[a] = 0
        for b in range(t.num_calls):
            relation = relation_of(t, p.mesh[a], p.mesh[b])
            p.relation[a, b] = OVERLAP if relation == EQUAL and not t.tells_equal[a, b] else relation
            if relation != DISJOINT:
                p.overlap[a] |= 1 << b
    fill_durations(t, p.option, p.relation, t.least_size, p.us)  # all calls are decided


@compiled
def overflow(t: Tables, p: CompletePlan) -> int:
    """Bytes by which devices are too small: the fullest ones, and where what lies there changes; 0 when all fits."""
    excess = beyond_fullest(t, p.option)
    for call in range(t.num_calls):
        device = t.mesh_start[p.mesh[call]]
        excess += excess_of(t, p, device)
    for device in t.kind_start:
        excess += excess_of(t, p, device)
    return excess


@inner
def excess_of(t: Tables, p: CompletePlan, device: int) -> int:
    """Bytes by which a device is too small."""
    return max(0, load_of(t, p.order, t.num_calls - 1, p.option, p.mesh, device) - t.device_bytes[device])


@compiled
def fits(t: Tables, p: CompletePlan) -> bool:
    """Whether every device has memory enough."""
    return overflow(t, p) == 0
