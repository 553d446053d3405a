"""Whether meshes can lie on the line of devices as a plan's relations ask, and where. Compiled backtracking."""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.tables.groups import ANY_COPY, NO_COPY
from prefect_rlhf.placement.search.tables.tables import DISJOINT, EQUAL, OVERLAP, UNDECIDED, Tables

MOST_TRIES = 2_000
NEVER_LIES, LIES, UNKNOWN = 0, 1, 2


@inner
def relation_of(t: Tables, first: int, second: int) -> int:
    """How two meshes (by number) lie."""
    if t.mesh_start[first] == t.mesh_start[second] and t.mesh_stop[first] == t.mesh_stop[second]:
        return EQUAL
    if t.mesh_start[first] < t.mesh_stop[second] and t.mesh_start[second] < t.mesh_stop[first]:
        return OVERLAP
    return DISJOINT


@inner
def suits(t: Tables, order: Ints, upto: int, relation: Ints, mesh: Ints) -> bool:
    """Whether the mesh of the call at `upto` lies right to all calls before it in `order`."""
    call = order[upto]
    for index in range(upto):
        other = order[index]
        wanted = relation[call, other]
        found = relation_of(t, mesh[call], mesh[other])
        if found == EQUAL and not t.tells_equal[call, other]:
            found = OVERLAP
        if wanted not in (UNDECIDED, found):
            return False
    return True


@inner
def mesh_class(t: Tables, option: Ints, call: int) -> int:
    """The class of meshes that a decided call runs on."""
    return t.option_class[t.option_start[call] + option[call]]


@compiled
def pack_meshes(
    t: Tables, order: Ints, cursor: Ints, num_placed: int, count: int, option: Ints, relation: Ints, mesh: Ints
) -> int:
    """Write into `mesh` where the first `count` calls of `order` can lie; keeps those of the first `num_placed`.

    Returns LIES, NEVER_LIES, or UNKNOWN after MOST_TRIES.

    `cursor` is room for the next mesh to try at each place in the order.
    Memory is looked at only where devices differ: on equal ones the relations say all (see `deepening.fits_together`).
    """
    upto, tries = num_placed, 0
    if upto < count:
        cursor[upto] = t.class_start[mesh_class(t, option, order[upto])]
    while num_placed <= upto < count:
        call = order[upto]
        tries += 1
        if tries > MOST_TRIES:
            return UNKNOWN
        if cursor[upto] == t.class_start[mesh_class(t, option, call) + 1]:
            upto -= 1
            continue
        mesh[call] = t.class_mesh[cursor[upto]]
        cursor[upto] += 1
        if suits(t, order, upto, relation, mesh) and (len(t.kind_start) == 0 or has_room(t, order, upto, option, mesh)):
            upto += 1
            if upto < count:
                cursor[upto] = t.class_start[mesh_class(t, option, order[upto])]
    return LIES if upto >= count else NEVER_LIES


@inner
def lies_right(t: Tables, order: Ints, option: Ints, relation: Ints, mesh: Ints) -> bool:
    """Whether all calls' meshes lie as the relations ask, and devices that differ hold what lies on them."""
    for upto in range(t.num_calls):
        if not suits(t, order, upto, relation, mesh):
            return False
        if len(t.kind_start) > 0 and not has_room(t, order, upto, option, mesh):
            return False
    return True


@inner
def has_room(t: Tables, order: Ints, upto: int, option: Ints, mesh: Ints) -> bool:
    """Whether every device of the newest mesh holds what lies on it, of the calls up to `upto` in `order`.

    What lies on a device, and how much it holds, changes only where a mesh starts or the device's kind does.
    """
    newest = mesh[order[upto]]
    for index in range(upto + 1):
        if not holds(t, order, upto, option, mesh, newest, t.mesh_start[mesh[order[index]]]):
            return False
    for device in t.kind_start:  # noqa: SIM110 - no generators in compiled code
        if not holds(t, order, upto, option, mesh, newest, device):
            return False
    return True


@inner
def holds(t: Tables, order: Ints, upto: int, option: Ints, mesh: Ints, newest: int, device: int) -> bool:
    """Whether a device is outside mesh `newest`, or has memory enough."""
    if not t.mesh_start[newest] <= device < t.mesh_stop[newest]:
        return True
    return load_of(t, order, upto, option, mesh, device) <= t.device_bytes[device]


@inner
def may_share(copy: int, other: int) -> bool:
    """Whether two options, or some of two groups, can share a copy."""
    if copy == NO_COPY or other == NO_COPY:
        return False
    return copy in (other, ANY_COPY) or other == ANY_COPY


@inner
def load_of(t: Tables, order: Ints, upto: int, option: Ints, mesh: Ints, device: int) -> int:
    """Peak bytes of a device: all static bytes (one copy where calls share it), and the largest active ones."""
    static, active = 0, 0
    for index in range(upto + 1):
        call = order[index]
        if t.mesh_start[mesh[call]] <= device < t.mesh_stop[mesh[call]]:
            at = t.option_start[call] + option[call]
            active = max(active, t.option_active[at])
            held = 0
            for earlier in range(index):
                before = t.option_start[order[earlier]] + option[order[earlier]]
                same = may_share(t.option_copy[at], t.option_copy[before])
                if same and relation_of(t, mesh[call], mesh[order[earlier]]) == EQUAL:
                    held = max(held, t.option_shared[before])
            static += max(0, t.option_static[at] - held)
    return static + active
