"""The alternatives at each decision of the exact search, in sequence."""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import inner
from prefect_rlhf.placement.search.exact.search_state import GROUP, OPTION, SearchState
from prefect_rlhf.placement.search.partial.partial import relate
from prefect_rlhf.placement.search.tables.tables import EQUAL, UNDECIDED, Tables


@inner
def next_alternative(t: Tables, s: SearchState, decision: int, call: int, other: int) -> bool:
    """Go to the next alternative of a decision. If no alternative is left, undo the decision and return False."""
    if other == GROUP:
        return next_group(t, s, decision, call)
    if other == OPTION:
        return next_option(t, s, decision, call)
    p = s.partial
    s.cursor[decision] += 1
    if s.cursor[decision] > EQUAL:
        relate(p, call, other, UNDECIDED)
        return False
    relate(p, call, other, s.cursor[decision])
    return True


@inner
def next_group(t: Tables, s: SearchState, decision: int, call: int) -> bool:
    """Go to the next group with a class of meshes in the call's domain. Returns False if no group is left."""
    p = s.partial
    domain = p.domain[p.depth[0]]
    first = t.group_start[call]
    s.cursor[decision] += 1
    while first + s.cursor[decision] < t.option_start[call + 1]:
        place = t.size_place[t.option_class[first + s.cursor[decision]]]
        if domain[0, call] <= place <= domain[1, call]:
            p.option[call] = s.group[call] = first + s.cursor[decision] - t.option_start[call]
            return True
        s.cursor[decision] += 1
    p.option[call] = UNDECIDED
    return False


@inner
def next_option(t: Tables, s: SearchState, decision: int, call: int) -> bool:
    """Go to the next option of the call's group; if no option is left, the group stands for its options again."""
    at = t.option_start[call] + s.group[call]
    s.cursor[decision] += 1
    if t.member_start[at] + s.cursor[decision] < t.member_start[at + 1]:
        s.partial.option[call] = t.member[t.member_start[at] + s.cursor[decision]]
        return True
    s.partial.option[call] = s.group[call]
    return False
