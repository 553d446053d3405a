"""A complete plan as arrays: each call's option and mesh, its time, and whether it fits; compiled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.bound.bound import bound_of, fill_areas
from prefect_rlhf.placement.search.bound.scratch import Scratch, scratch_for
from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.partial.durations import fill_durations
from prefect_rlhf.placement.search.partial.fullest import beyond_fullest, fill_crowd
from prefect_rlhf.placement.search.partial.packing import Packing, load_of, relation_of
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.tables import DISJOINT, EQUAL, OVERLAP, Tables

INFINITE = 1 << 62  # microseconds: the time if there is no plan
OVERFLOW_FACTOR = 3  # multiplies the time of a plan that overflows memory (ReaL, section 5.2)


@dataclass(frozen=True, slots=True, eq=False)
class CompletePlan(Record):
    """A plan; arrays are changed in place."""

    option: Ints  # [C]
    mesh: Ints  # [C]
    relation: Ints  # [C, C]: scratch, as all below
    overlap: Ints  # [C]
    us: Ints  # [V]
    order: Ints  # [C]
    scratch: Scratch


def empty_complete_plan(t: Tables) -> CompletePlan:
    """Start with each call's first option on the first mesh of its class."""
    first_class = t.option_class[t.option_start[:-1]]
    return CompletePlan(
        option=np.zeros(t.num_calls, dtype=np.int64),
        mesh=t.class_mesh[t.class_start[first_class]],
        relation=np.zeros((t.num_calls, t.num_calls), dtype=np.int64),
        overlap=np.zeros(t.num_calls, dtype=np.int64),
        us=np.zeros(t.num_nodes, dtype=np.int64),
        order=np.arange(t.num_calls, dtype=np.int64),
        scratch=scratch_for(t),
    )


@compiled
def evaluate(t: Tables, p: CompletePlan) -> int:
    """The time in microseconds, times OVERFLOW_FACTOR if a device overflows."""
    us = time_of(t, p)
    return us if fits(t, p) else OVERFLOW_FACTOR * us


@inner
def time_of(t: Tables, p: CompletePlan) -> int:
    """The time of a plan in microseconds, whether or not it fits, by the rule.

    A measured period can be too short while one part of the graph is ahead of another, so the plan's own bound counts
    too.
    """
    fill_relations(t, p)
    return max(time_by_schedule(t, p), own_bound(t, p, INFINITE))


@inner
def time_by_schedule(t: Tables, p: CompletePlan) -> int:
    """The time of a plan's schedule in microseconds; relations and durations are filled."""
    return t.rule.schedule(t.rule, t, p.option, p.relation, p.us, p.overlap)


@inner
def own_bound(t: Tables, p: CompletePlan, enough: int) -> int:
    """The bound of a plan with filled relations and durations."""
    fill_areas(t, p.option, t.least_area, t.least_size, p.us, p.scratch.area)
    fill_crowd(t, p.option, p.relation, p.overlap, p.us, p.scratch.crowd)
    return bound_of(t, p.option, p.relation, p.us, p.overlap, p.scratch, enough)


@compiled
def fill_relations(t: Tables, p: CompletePlan) -> None:
    """Write the relations of all meshes, and the node durations that follow from them."""
    for a in range(t.num_calls):
        p.overlap[a] = 0
        for b in range(t.num_calls):
            relation = relation_of(t, p.mesh[a], p.mesh[b])
            p.relation[a, b] = OVERLAP if relation == EQUAL and not t.tells_equal[a, b] else relation
            if relation != DISJOINT:
                p.overlap[a] |= 1 << b
    fill_durations(t, p.option, p.relation, t.least_size, p.us)  # all calls are decided


@inner
def overflow(t: Tables, p: CompletePlan) -> int:
    """Bytes that are missing on the fullest devices, and on devices at which the load changes; 0 if everything fits.

    Expects that the relations are filled.
    """
    excess = beyond_fullest(t, p.option, p.relation)
    for call in range(t.num_calls):
        excess += excess_of(t, p, t.mesh_start[p.mesh[call]])
    for device in t.capacity_changes:
        excess += excess_of(t, p, device)
    return excess


@inner
def excess_of(t: Tables, p: CompletePlan, device: int) -> int:
    """Bytes that are missing on a device."""
    packing = Packing(p.order, p.option, p.relation, p.mesh)
    return max(0, load_of(t, packing, t.num_calls, device) - t.device_bytes[device])


@compiled
def fits(t: Tables, p: CompletePlan) -> bool:
    """Whether every device has enough memory."""
    return overflow(t, p) == 0
