"""What each decision of the exact search may be, one alternative after the other.

Of plans that are the same up to a permutation of calls (`symmetry`) only one is gone through: the one whose earlier
calls have the earlier groups, or lie alike to all calls before and earlier to the next.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import inner, lowest
from prefect_rlhf.placement.search.exact.search_state import GROUP, OPTION, SearchState
from prefect_rlhf.placement.search.partial.partial import relate
from prefect_rlhf.placement.search.tables.tables import EQUAL, UNDECIDED, Tables


@inner
def next_alternative(t: Tables, r: SearchState, level: int, call: int, other: int) -> bool:
    """Take the next alternative of a level. With none left, undecide it and return False."""
    if other == GROUP:
        return next_group(t, r, level, call)
    if other == OPTION:
        return next_option(t, r, level, call)
    p = r.partial
    r.cursor[level] += 1
    if r.cursor[level] > EQUAL:
        relate(p, call, other, UNDECIDED)
        return False
    relate(p, call, other, r.cursor[level])
    return True


@inner
def next_group(t: Tables, r: SearchState, level: int, call: int) -> bool:
    """The next group whose class of meshes is in the call's domain."""
    p = r.partial
    domain = p.domain[p.depth[0]]
    first = t.group_start[call]
    r.cursor[level] += 1
    while first + r.cursor[level] < t.option_start[call + 1]:
        place = t.size_place[t.option_class[first + r.cursor[level]]]
        if domain[0, call] <= place <= domain[1, call] and is_first_of_alike(t, r, call, r.cursor[level]):
            p.option[call] = r.group[call] = first + r.cursor[level] - t.option_start[call]
            return True
        r.cursor[level] += 1
    p.option[call] = UNDECIDED
    return False


@inner
def next_option(t: Tables, r: SearchState, level: int, call: int) -> bool:
    """The next option of the call's group; with none left, the group stands for its options again."""
    at = t.option_start[call] + r.group[call]
    r.cursor[level] += 1
    if t.member_start[at] + r.cursor[level] < t.member_start[at + 1]:
        r.partial.option[call] = t.member[t.member_start[at] + r.cursor[level]]
        return True
    r.partial.option[call] = r.group[call]
    return False


@inner
def is_first_of_alike(t: Tables, r: SearchState, call: int, group: int) -> bool:
    """Whether no earlier call that can change places with this one has a later group."""
    earlier = r.not_before[call]
    while earlier:
        other = lowest(earlier)
        earlier &= earlier - 1
        if r.group[other] + t.option_start[other] - t.group_start[other] > group:
            return False
    return True


@inner
def relation_is_first_of_alike(r: SearchState, level: int, call: int, other: int) -> bool:
    """Whether no earlier call that can change places with this one, of the same group, lies later to those before."""
    p = r.partial
    earlier = r.not_before[call]
    while earlier:
        alike = lowest(earlier)
        earlier &= earlier - 1
        if r.group[alike] != r.group[call] or r.place[other] >= r.place[alike]:
            continue
        if p.relation[alike, other] > p.relation[call, other] and same_before(r, level, alike, call):
            return False
    return True


@inner
def same_before(r: SearchState, level: int, first: int, second: int) -> bool:
    """Whether two calls lie alike to all calls before both of which that has been decided before this level."""
    at = level - 1
    while r.level_other[at] >= 0:
        other = r.level_other[at]
        if r.place[other] < r.place[first] and r.partial.relation[first, other] != r.partial.relation[second, other]:
            return False
        at -= 1
    return True
