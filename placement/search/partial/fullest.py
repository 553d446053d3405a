"""Memory of a mesh's fullest device: pipeline stages differ, and calls on all its devices add to each of them.

So a plan may overflow there, or may have no room for a model that comes while a call runs.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.cliques import heaviest_clique
from prefect_rlhf.placement.search.bound.exclusion import visitors
from prefect_rlhf.placement.search.bound.scratch import Crowd
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.partial.packing import may_share, mesh_class
from prefect_rlhf.placement.search.tables.tables import DISJOINT, EQUAL, OVERLAP, UNDECIDED, Tables


@inner
def beyond_fullest(t: Tables, option: Ints, relation: Ints) -> int:
    """Bytes that are missing on the fullest devices, summed over the decided calls that run there."""
    excess = 0
    for running in range(t.num_calls):
        if option[running] != UNDECIDED:
            own = t.option_fullest[t.option_start[running] + option[running]]
            excess += max(0, own + static_around(t, option, relation, running, running) - t.most_bytes)
    return excess


@inner
def fill_crowd(t: Tables, option: Ints, relation: Ints, overlap: Ints, us: Ints, crowd: Crowd) -> None:
    """Write for each call the calls of other copies whose visits surely find no room on its devices while it runs.

    A visit is a call with its link nodes. There is no room on the fullest device of the running call, if the visitor's
    mesh has all its devices, or on a device of both meshes. Also write the visits that are late for that.
    """
    visiting = visitors(t, us)
    crowd.late[0] = 0
    static = 0
    fill_apart(t, option, visiting, crowd)
    for call in range(t.num_calls):
        crowd.beside[call] = 0
        if visiting:
            crowd.held[call] = 0 if option[call] == UNDECIDED else static_beyond_shared(t, option, relation, call)
            static += crowd.held[call]
    for running in range(t.num_calls if visiting else 0):
        others = 0 if option[running] == UNDECIDED else visiting & ~(1 << running)
        while others:
            visitor = lowest(others)
            others &= others - 1
            if is_crowded(t, option, relation, overlap, crowd, running, visitor, static):
                crowd.beside[running] |= 1 << visitor
                if none_lies_between(t, option, relation, running, visitor):
                    crowd.late[0] |= 1 << visitor


@inner
def fill_apart(t: Tables, option: Ints, visiting: int, crowd: Crowd) -> None:
    """Write the calls with visits that exclude each other on common devices: of other roles, or of different copies.

    A call without a link node of its own also visits if its copy leaves, because a link node of the copy precedes it.
    """
    for call in range(t.num_calls):
        crowd.apart[call] = 0
    if not visiting:
        return
    for call in range(t.num_calls):
        if is_of_a_call(t, option, call) and comes_with_more(t, option, call):
            visiting |= 1 << call
    for call in range(t.num_calls):
        for other in range(call if visiting >> call & 1 else 0):
            if visiting >> other & 1 and (t.strangers[call] >> other & 1 or are_never_one(t, option, call, other)):
                crowd.apart[call] |= 1 << other
                crowd.apart[other] |= 1 << call


@inner
def are_never_one(t: Tables, option: Ints, first: int, second: int) -> bool:
    """Whether two calls of a role are decided and have different copies."""
    decided = option[first] != UNDECIDED and option[second] != UNDECIDED
    return decided and not copies_may_be_one(t, option, first, second)


@inner
def is_crowded(
    t: Tables, option: Ints, relation: Ints, overlap: Ints, crowd: Crowd, running: int, visitor: int, static: int
) -> bool:
    """Whether a visit surely finds no room beside a running call with another copy; see `is_full_between`."""
    if option[visitor] == UNDECIDED or not comes_with_more(t, option, visitor):
        return False
    if copies_may_be_one(t, option, visitor, running):
        return False
    if is_full_with(t, option, relation, running, visitor):
        return True
    shares = overlap[running] >> visitor & 1
    return shares != 0 and is_full_between(t, option, overlap, crowd, running, visitor, static)


@inner
def comes_with_more(t: Tables, option: Ints, call: int) -> bool:
    """Whether a decided call's model holds more during its visit than at other times."""
    at = t.option_start[call] + option[call]
    return t.option_loaded[at] > t.option_static[at]


@inner
def is_full_with(t: Tables, option: Ints, relation: Ints, running: int, visitor: int) -> bool:
    """Whether a visit has no room on the fullest device of a running call, if it has all of that call's devices."""
    if not surely_covers(t, option, relation, visitor, running):
        return False
    own = t.option_fullest[t.option_start[running] + option[running]]
    loaded = t.option_loaded[t.option_start[visitor] + option[visitor]]
    return own + static_around(t, option, relation, running, visitor) + loaded > t.most_bytes


@inner
def is_full_between(
    t: Tables, option: Ints, overlap: Ints, crowd: Crowd, running: int, visitor: int, static: int
) -> bool:
    """Whether a visit has no room on a device that it shares with a running call and with other calls that overlap
    both.

    Meshes that overlap pairwise have a device in common. `static` are the static bytes of all calls, or more.
    """
    at = t.option_start[running] + option[running]
    both = t.option_static[at] + t.option_active[at] + t.option_loaded[t.option_start[visitor] + option[visitor]]
    if both + static <= t.most_bytes:
        return False
    others = overlap[running] & overlap[visitor] & ~(1 << running | 1 << visitor)
    candidates = others
    while others:
        call = lowest(others)
        others &= others - 1
        if copies_may_be_one(t, option, call, running) or copies_may_be_one(t, option, call, visitor):
            candidates &= ~(1 << call)
    around, _ = heaviest_clique(overlap, crowd.held, candidates, crowd.stack)
    return both + around > t.most_bytes


@inner
def none_lies_between(t: Tables, option: Ints, relation: Ints, running: int, visitor: int) -> bool:
    """Whether no other model can come to a visitor's devices between its visit and the next run of a call.

    Each call that could is decided, and either keeps its copy on its devices or has other devices.
    """
    others = t.between[running, visitor] & ~(1 << visitor)
    while others:
        call = lowest(others)
        others &= others - 1
        is_elsewhere = relation[call, visitor] == DISJOINT
        if not is_elsewhere and (not is_of_a_call(t, option, call) or comes_with_more(t, option, call)):
            return False
    return True


@inner
def is_of_a_call(t: Tables, option: Ints, call: int) -> bool:
    """Whether a call is decided with an option of its own, not a stand-in for several, some of which may stay."""
    return UNDECIDED < option[call] < t.group_start[call] - t.option_start[call]


@inner
def static_beyond_shared(t: Tables, option: Ints, relation: Ints, call: int) -> int:
    """A call's static bytes beyond those that it shares with a lower-numbered call on an equal mesh."""
    at = t.option_start[call] + option[call]
    shared = 0
    for other in range(call):
        if relation[call, other] == EQUAL:
            before = t.option_start[other] + option[other]
            if may_share(t.option_copy[at], t.option_copy[before]):
                shared = max(shared, t.option_shared[before])
    return max(0, t.option_static[at] - shared)


@inner
def static_around(t: Tables, option: Ints, relation: Ints, running: int, beside: int) -> int:
    """Static bytes that calls on all devices of a call's mesh add to its own; a shared copy counts once.

    The copies of the call itself and of the call `beside` are left out.
    """
    static = 0
    for call in range(t.num_calls):
        if call == beside or not surely_covers(t, option, relation, call, running):
            continue
        if not (copies_may_be_one(t, option, call, running) or copies_may_be_one(t, option, call, beside)):
            held = t.option_static[t.option_start[call] + option[call]]
            static += max(0, held - shared_before(t, option, relation, call, running))
    return static


@inner
def shared_before(t: Tables, option: Ints, relation: Ints, call: int, running: int) -> int:
    """The largest part of a call's copy, in bytes, that an earlier call on all devices of the mesh may have brought."""
    shared = 0
    for other in range(call):
        if surely_covers(t, option, relation, other, running) and copies_may_be_one(t, option, call, other):
            shared = max(shared, t.option_shared[t.option_start[other] + option[other]])
    return shared


@inner
def surely_covers(t: Tables, option: Ints, relation: Ints, call: int, running: int) -> bool:
    """Whether another decided call certainly has all devices of a call's mesh, given their relation."""
    if call == running or option[call] == UNDECIDED:
        return False
    related = relation[running, call]
    inside = t.lies_within[mesh_class(t, option, running), mesh_class(t, option, call)] != 0
    if t.class_size[mesh_class(t, option, call)] == t.num_devices:
        return True
    return related == EQUAL or (related == OVERLAP and inside)


@inner
def copies_may_be_one(t: Tables, option: Ints, first: int, second: int) -> bool:
    """Whether two decided calls can share the static bytes of a single copy."""
    a, b = t.option_start[first] + option[first], t.option_start[second] + option[second]
    return may_share(t.option_copy[a], t.option_copy[b])
