"""Memory of the fullest device of a mesh: pipeline stages differ, and calls on all its devices add to each of them.

So a plan may overflow there, or a model may have no room to come while a call runs.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.exclusion import visitors
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.partial.packing import may_share, mesh_class
from prefect_rlhf.placement.search.tables.tables import EQUAL, OVERLAP, UNDECIDED, Tables


@inner
def beyond_fullest(t: Tables, option: Ints, relation: Ints) -> int:
    """Bytes by which the fullest devices are too small, summed over the decided calls that run there."""
    excess = 0
    for running in range(t.num_calls):
        if option[running] != UNDECIDED:
            own = t.option_fullest[t.option_start[running] + option[running]]
            excess += max(0, own + static_around(t, option, relation, running, running) - t.most_bytes)
    return excess


@inner
def fill_crowded(t: Tables, option: Ints, relation: Ints, us: Ints, crowded: Ints) -> None:
    """Write for each call the calls of other roles whose visits surely find no room on its devices while it runs.

    A visit is a call with its link nodes. Its mesh has all devices of the running call, also the fullest.
    """
    visiting = visitors(t, us)
    for running in range(t.num_calls):
        crowded[running] = 0
        if option[running] == UNDECIDED:
            continue
        own = t.option_fullest[t.option_start[running] + option[running]]
        others = visiting & t.strangers[running]
        while others:
            visitor = lowest(others)
            others &= others - 1
            if not surely_covers(t, option, relation, visitor, running):
                continue
            at = t.option_start[visitor] + option[visitor]
            if t.option_loaded[at] > t.option_static[at] and not copies_may_be_one(t, option, visitor, running):
                around = static_around(t, option, relation, running, visitor)
                if own + around + t.option_loaded[at] > t.most_bytes:
                    crowded[running] |= 1 << visitor


@inner
def static_around(t: Tables, option: Ints, relation: Ints, running: int, beside: int) -> int:
    """Static bytes that calls on all devices of a call's mesh add to its own; a copy that some share counts once.

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
    """The most bytes of a call's copy that an earlier call on all devices of the mesh may have brought."""
    shared = 0
    for other in range(call):
        if surely_covers(t, option, relation, other, running) and copies_may_be_one(t, option, call, other):
            shared = max(shared, t.option_shared[t.option_start[other] + option[other]])
    return shared


@inner
def surely_covers(t: Tables, option: Ints, relation: Ints, call: int, running: int) -> bool:
    """Whether another decided call has all devices of a call's mesh, wherever they lie as related."""
    if call == running or option[call] == UNDECIDED:
        return False
    related = relation[running, call]
    inside = t.lies_within[mesh_class(t, option, running), mesh_class(t, option, call)] != 0
    if t.class_size[mesh_class(t, option, call)] == t.num_devices:
        return True
    return related == EQUAL or (related == OVERLAP and inside)


@inner
def copies_may_be_one(t: Tables, option: Ints, first: int, second: int) -> bool:
    """Whether the static bytes of two decided calls can be a single copy."""
    a, b = t.option_start[first] + option[first], t.option_start[second] + option[second]
    return may_share(t.option_copy[a], t.option_copy[b])
