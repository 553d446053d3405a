"""Packs meshes on the line of devices as a plan's relations and the devices' memory require, by compiled
backtracking.
"""

from __future__ import annotations

from typing import NamedTuple

from prefect_rlhf.placement.search.compiled import Ints, inner
from prefect_rlhf.placement.search.tables.groups import ANY_COPY, NO_COPY
from prefect_rlhf.placement.search.tables.tables import DISJOINT, EQUAL, OVERLAP, UNDECIDED, Tables

MOST_TRIES = 2_000
IMPOSSIBLE, PACKED, UNKNOWN = 0, 1, 2


class Packing(NamedTuple):
    """The meshes of the first calls of an order, and the relations that they must satisfy."""

    order: Ints  # [C]: calls
    option: Ints  # [C]
    relation: Ints  # [C, C]
    mesh: Ints  # [C]


@inner
def relation_of(t: Tables, first: int, second: int) -> int:
    """The relation of two meshes, given by number."""
    if t.mesh_start[first] == t.mesh_start[second] and t.mesh_stop[first] == t.mesh_stop[second]:
        return EQUAL
    if t.mesh_start[first] < t.mesh_stop[second] and t.mesh_start[second] < t.mesh_stop[first]:
        return OVERLAP
    return DISJOINT


@inner
def mesh_class(t: Tables, option: Ints, call: int) -> int:
    """The class of meshes that a decided call runs on."""
    return t.option_class[t.option_start[call] + option[call]]


@inner
def pack_meshes(t: Tables, k: Packing, cursor: Ints, num_placed: int, count: int) -> int:
    """Write meshes for the first `count` calls of the order; keep the meshes of the first `num_placed`.

    Returns PACKED, IMPOSSIBLE, or UNKNOWN after MOST_TRIES. `cursor` is scratch space for the next mesh to try at each
    place in the order.
    """
    upto, tries = num_placed, 0
    if upto < count:
        cursor[upto] = t.class_start[mesh_class(t, k.option, k.order[upto])]
    while num_placed <= upto < count:
        call = k.order[upto]
        tries += 1
        if tries > MOST_TRIES:
            return UNKNOWN
        if cursor[upto] == t.class_start[mesh_class(t, k.option, call) + 1]:
            upto -= 1
            continue
        k.mesh[call] = t.class_mesh[cursor[upto]]
        cursor[upto] += 1
        if is_placed(t, k, upto):
            upto += 1
            if upto < count:
                cursor[upto] = t.class_start[mesh_class(t, k.option, k.order[upto])]
    return PACKED if upto >= count else IMPOSSIBLE


@inner
def is_packed(t: Tables, k: Packing) -> bool:
    """Whether the meshes of all calls have the required relations and, if devices differ, everything fits on them."""
    for upto in range(t.num_calls):  # noqa: SIM110 - no generators in compiled code
        if not is_placed(t, k, upto):
            return False
    return True


@inner
def is_placed(t: Tables, k: Packing, upto: int) -> bool:
    """Whether the mesh at place `upto` of the order is compatible with the meshes before it.

    Memory is checked only if devices differ: on equal devices the relations suffice (see `partial.fits_together`).
    """
    return lies_as_related(t, k, upto) and (len(t.capacity_changes) == 0 or has_room(t, k, upto))


@inner
def lies_as_related(t: Tables, k: Packing, upto: int) -> bool:
    """Whether the mesh at place `upto` of the order has the decided relations to all meshes before it."""
    call = k.order[upto]
    for index in range(upto):
        other = k.order[index]
        relation = relation_of(t, k.mesh[call], k.mesh[other])
        if relation == EQUAL and not t.tells_equal[call, other]:
            relation = OVERLAP
        if k.relation[call, other] not in (UNDECIDED, relation):
            return False
    return True


@inner
def has_room(t: Tables, k: Packing, upto: int) -> bool:
    """Whether every device of the mesh at place `upto` can hold the calls up to that place.

    The load of a device changes only at the start of a mesh, its memory only at `capacity_changes`.
    """
    for index in range(upto + 1):
        if not holds(t, k, upto, t.mesh_start[k.mesh[k.order[index]]]):
            return False
    for device in t.capacity_changes:  # noqa: SIM110 - no generators in compiled code
        if not holds(t, k, upto, device):
            return False
    return True


@inner
def holds(t: Tables, k: Packing, upto: int, device: int) -> bool:
    """Whether a device is outside the mesh at place `upto`, or has enough memory."""
    newest = k.mesh[k.order[upto]]
    if not t.mesh_start[newest] <= device < t.mesh_stop[newest]:
        return True
    return load_of(t, k, upto + 1, device) <= t.device_bytes[device]


@inner
def load_of(t: Tables, k: Packing, count: int, device: int) -> int:
    """Peak bytes of the first `count` calls on a device: all static bytes (a shared copy once), and the largest active
    bytes.
    """
    static, active = 0, 0
    for index in range(count):
        call = k.order[index]
        if t.mesh_start[k.mesh[call]] <= device < t.mesh_stop[k.mesh[call]]:
            at = t.option_start[call] + k.option[call]
            active = max(active, t.option_active[at])
            shared = 0
            for earlier in range(index):
                other = k.order[earlier]
                before = t.option_start[other] + k.option[other]
                is_shared = may_share(t.option_copy[at], t.option_copy[before])
                if is_shared and relation_of(t, k.mesh[call], k.mesh[other]) == EQUAL:
                    shared = max(shared, t.option_shared[before])
            static += max(0, t.option_static[at] - shared)
    return static + active


@inner
def may_share(copy: int, other: int) -> bool:
    """Whether two options, or options of two groups, can share a copy."""
    if copy == NO_COPY or other == NO_COPY:
        return False
    return copy in (other, ANY_COPY) or other == ANY_COPY
