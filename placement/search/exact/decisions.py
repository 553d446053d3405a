"""The alternatives of each decision of the exact search, in sequence.

Of plans that differ only by a permutation of calls (`symmetry`) a single plan is visited. In it, an earlier call has an
earlier group than its symmetric calls, or, with the same group and the same relations so far, an earlier relation to
the next call.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import inner, lowest
from prefect_rlhf.placement.search.exact.search_state import GROUP, OPTION, SearchState
from prefect_rlhf.placement.search.partial.partial import relate
from prefect_rlhf.placement.search.tables.tables import EQUAL, UNDECIDED, Tables


@inner
def next_alternative(t: Tables, s: SearchState, decision: int, call: int, other: int) -> bool:
    """Take the next alternative of a decision. If no alternative is left, undo the decision and return False."""
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
    """Take the next group whose class of meshes is in the call's domain. Returns False if no group is left."""
    p = s.partial
    domain = p.domain[p.depth[0]]
    first = t.group_start[call]
    s.cursor[decision] += 1
    while first + s.cursor[decision] < t.option_start[call + 1]:
        place = t.size_place[t.option_class[first + s.cursor[decision]]]
        if domain[0, call] <= place <= domain[1, call] and is_first_of_alike(t, s, call, s.cursor[decision]):
            p.option[call] = s.group[call] = first + s.cursor[decision] - t.option_start[call]
            return True
        s.cursor[decision] += 1
    p.option[call] = UNDECIDED
    return False


@inner
def next_option(t: Tables, s: SearchState, decision: int, call: int) -> bool:
    """Take the next option of the call's group; if no option is left, the group stands for its options again."""
    at = t.option_start[call] + s.group[call]
    s.cursor[decision] += 1
    if t.member_start[at] + s.cursor[decision] < t.member_start[at + 1]:
        s.partial.option[call] = t.member[t.member_start[at] + s.cursor[decision]]
        return True
    s.partial.option[call] = s.group[call]
    return False


@inner
def is_first_of_alike(t: Tables, s: SearchState, call: int, group: int) -> bool:
    """Whether no earlier call that can change places with this call has a later group."""
    earlier = s.not_before[call]
    while earlier:
        other = lowest(earlier)
        earlier &= earlier - 1
        if s.group[other] + t.option_start[other] - t.group_start[other] > group:
            return False
    return True


@inner
def relation_is_first_of_alike(s: SearchState, decision: int, call: int, other: int) -> bool:
    """Whether the relation keeps symmetric calls in order.

    It does not if an earlier symmetric call of the same group has a later relation to `other` and the same relations
    before.
    """
    p = s.partial
    earlier = s.not_before[call]
    while earlier:
        alike = lowest(earlier)
        earlier &= earlier - 1
        if s.group[alike] != s.group[call] or s.place[other] >= s.place[alike]:
            continue
        if p.relation[alike, other] > p.relation[call, other] and same_before(s, decision, alike, call):
            return False
    return True


@inner
def same_before(s: SearchState, decision: int, first: int, second: int) -> bool:
    """Whether two calls lie alike to all calls before both of them whose relations have been decided by now."""
    at = decision - 1
    while s.decision_other[at] >= 0:
        other = s.decision_other[at]
        if s.place[other] < s.place[first] and s.partial.relation[first, other] != s.partial.relation[second, other]:
            return False
        at -= 1
    return True
