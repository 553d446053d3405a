"""A partial plan: its decided options and relations, its bound, and the further decisions it allows; compiled."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.bound.bound import bound_of, call_size, fill_areas
from prefect_rlhf.placement.search.bound.cliques import heaviest_clique
from prefect_rlhf.placement.search.bound.scratch import Scratch, scratch_for
from prefect_rlhf.placement.search.compiled import Ints, compiled, inner, lowest
from prefect_rlhf.placement.search.partial.durations import fill_durations
from prefect_rlhf.placement.search.partial.fullest import fill_crowd, static_beyond_shared
from prefect_rlhf.placement.search.partial.packing import mesh_class
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.tables import DISJOINT, EQUAL, UNDECIDED, Tables

US, AREA, SIZE = range(3)  # rows of `Partial.least`


@dataclass(frozen=True, slots=True, eq=False)
class Partial(Record):
    """Decisions so far, and what follows from them; arrays are changed in place."""

    option: Ints  # [C], UNDECIDED or the number of an option of that call
    relation: Ints  # [C, C]
    overlap: Ints  # [C]: set of calls whose meshes overlap it, with itself
    apart: Ints  # [C]: set of calls whose meshes are disjoint from it
    mesh: Ints  # [C]: a mesh for each call that lies right to those placed before it
    us: Ints  # [V]: durations
    depth: Ints  # [1]: the number of calls before the call under decision
    least: Ints  # [C + 1, 3, C]: at each depth the least that an undecided call takes, see `domains`
    domain: Ints  # [C + 1, 2, C]: at each depth first and last place by size of the classes left to a call
    must_overlap: Ints  # [C]: `overlap`, and the calls that are too large to be disjoint from it
    weights: Ints  # [C]: scratch
    scratch: Scratch


def empty_partial(t: Tables) -> Partial:
    """Start without decisions."""
    least = np.zeros((t.num_calls + 1, 3, t.num_calls), dtype=np.int64)
    least[:] = np.stack([t.least_cost[t.node_of], t.least_area, t.least_size])
    domain = np.zeros((t.num_calls + 1, 2, t.num_calls), dtype=np.int64)
    domain[:, 1] = len(t.class_size) - 1
    return Partial(
        option=np.full(t.num_calls, UNDECIDED, dtype=np.int64),
        relation=np.full((t.num_calls, t.num_calls), UNDECIDED, dtype=np.int64),
        overlap=np.array([1 << call for call in range(t.num_calls)], dtype=np.int64),
        apart=np.zeros(t.num_calls, dtype=np.int64),
        mesh=np.zeros(t.num_calls, dtype=np.int64),
        us=np.zeros(t.num_nodes, dtype=np.int64),
        depth=np.zeros(1, dtype=np.int64),
        least=least,
        domain=domain,
        must_overlap=np.zeros(t.num_calls, dtype=np.int64),
        weights=np.zeros(t.num_calls, dtype=np.int64),
        scratch=scratch_for(t),
    )


@compiled
def relate(p: Partial, first: int, second: int, relation: int) -> None:
    """Decide (or undecide) the relation of two meshes."""
    p.relation[first, second] = p.relation[second, first] = relation
    for a, b in ((first, second), (second, first)):
        bit = 1 << b
        p.overlap[a] = p.overlap[a] | bit if relation > DISJOINT else p.overlap[a] & ~bit
        p.apart[a] = p.apart[a] | bit if relation == DISJOINT else p.apart[a] & ~bit


@compiled
def bound_partial(t: Tables, p: Partial, enough: int) -> int:
    """A lower bound in microseconds on every completion of the plan; see `bound_of`."""
    least = p.least[p.depth[0]]
    fill_durations(t, p.option, p.relation, least[US], p.us)
    fill_areas(t, p.option, least[AREA], least[SIZE], p.us, p.scratch.area)
    fill_must_overlap(t, p, least[SIZE])
    fill_crowd(t, p.option, p.relation, p.overlap, p.us, p.scratch.crowd)
    return bound_of(t, p.option, p.relation, p.us, p.must_overlap, p.scratch, enough)


@inner
def fill_must_overlap(t: Tables, p: Partial, least_size: Ints) -> None:
    """Write which calls have meshes that overlap, or must, because together they have more devices than exist."""
    for call in range(t.num_calls):
        p.must_overlap[call] = p.overlap[call]
    for first in range(t.num_calls):
        size = call_size(t, p.option, least_size, first)
        for second in range(first):
            both = size + call_size(t, p.option, least_size, second)
            if both > t.num_devices:
                p.must_overlap[first] |= 1 << second
                p.must_overlap[second] |= 1 << first


@inner
def bound_slower(t: Tables, p: Partial, call: int, enough: int) -> int:
    """A bound that also holds for all options of `call` on this class of meshes that are no faster than its current
    option.

    Such an option may make moves shorter, so these get their shortest durations.
    """
    own = p.option[call]
    mesh_class = t.option_class[t.option_start[call] + own]
    p.option[call] = UNDECIDED
    value = bound_probe(t, p, call, t.option_cost[t.option_start[call] + own], t.class_size[mesh_class], enough)
    p.option[call] = own
    return value


@inner
def bound_probe(t: Tables, p: Partial, call: int, us: int, size: int, enough: int) -> int:
    """A bound if an undecided call takes at least `us` microseconds on at least `size` devices."""
    least = p.least[p.depth[0]]
    before = least[US, call], least[AREA, call], least[SIZE, call]
    least[US, call], least[AREA, call], least[SIZE, call] = us, us * size, size
    value = bound_partial(t, p, enough)
    least[US, call], least[AREA, call], least[SIZE, call] = before
    return value


@inner
def possible(t: Tables, p: Partial, first: int, second: int, relation: int) -> bool:
    """Whether meshes of these two calls' classes can have a relation that the problem distinguishes from others."""
    if relation == EQUAL and not t.tells_equal[first, second]:
        return False
    return t.can_lie[relation, mesh_class(t, p.option, first), mesh_class(t, p.option, second)] != 0


@inner
def fits_apart(t: Tables, p: Partial, first: int, second: int) -> bool:
    """Whether all meshes that are disjoint from each other, including these two, have enough devices."""
    sizes = p.weights
    for call in range(t.num_calls):
        sizes[call] = call_size(t, p.option, p.least[p.depth[0], SIZE], call)
    most, _ = heaviest_clique(p.apart, sizes, p.apart[first] & p.apart[second], p.scratch.stack)
    return most + sizes[first] + sizes[second] <= t.num_devices


@inner
def fits_together(t: Tables, p: Partial, call: int) -> bool:
    """Whether a device can hold every group of calls with pairwise overlapping meshes that contains `call`.

    Intervals that overlap pairwise share a device, so each group is the load of a real device: all their static bytes
    and the largest active bytes. (If devices differ, `pack_meshes` checks each.)
    """
    static = p.weights
    members = p.overlap[call]
    while members:
        static[lowest(members)] = static_beyond_shared(t, p.option, p.relation, lowest(members))
        members &= members - 1
    members = p.overlap[call]
    while members:
        running = lowest(members)
        members &= members - 1
        both = 1 << call | 1 << running
        load, _ = heaviest_clique(p.overlap, static, p.overlap[call] & p.overlap[running] & ~both, p.scratch.stack)
        load += static[call] + (static[running] if running != call else 0)
        if load + t.option_active[t.option_start[running] + p.option[running]] > t.most_bytes:
            return False
    return True
