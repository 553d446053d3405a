"""Exact search by iterative deepening on the threshold: each round proves that no plan ends sooner.

A round goes depth first through the calls: for each every option, then how its mesh lies to each earlier one's. What
cannot be laid out, overflows memory, or has a bound at or above the threshold is left. So when a round ends, every plan
that it left takes at least `least_left`: the next lower bound. Options are never left out for being slower and no
smaller than others: under list scheduling a shorter call can lengthen the makespan (Graham's anomalies), so the best
plan could be among them. But a call's mesh is decided first, with a group of options (`groups`) for them.

A round is a sequence of decisions (levels): for each call k its group of options, then its relation to each of the k
calls before. Its option follows the group for a call with moves, and for any other when all meshes are decided. The
cursors say which alternative each level is at, so a round can stop anywhere and go on.
"""

from __future__ import annotations

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.exact.decisions import next_alternative, relation_is_first_of_alike
from prefect_rlhf.placement.search.exact.domains import deeper, narrow
from prefect_rlhf.placement.search.exact.search_state import (
    BEST,
    EVALUATIONS,
    FLOOR,
    GROUP,
    INFINITE,
    LEAST_LEFT,
    LEVEL,
    OPTION,
    THRESHOLD,
    SearchState,
)
from prefect_rlhf.placement.search.partial.complete import CompletePlan
from prefect_rlhf.placement.search.partial.fullest import beyond_fullest
from prefect_rlhf.placement.search.partial.list_schedule import fill_durations, list_schedule
from prefect_rlhf.placement.search.partial.packing import LIES, NEVER_LIES, lies_right, mesh_class, pack_meshes
from prefect_rlhf.placement.search.partial.partial import (
    Partial,
    bound_partial,
    bound_slower,
    empty_partial,
    fits_apart,
    fits_together,
    possible,
    relate,
)
from prefect_rlhf.placement.search.tables.tables import DISJOINT, UNDECIDED, Tables, calls_with_moves

FEW = 2  # undecided calls for which it does not pay to narrow their domains


def decision_order(t: Tables) -> list[int]:
    """Calls in the order in which to decide them: those first that take most devices for longest."""
    moved = calls_with_moves(t)
    return sorted(range(t.num_calls), key=lambda call: (-int(t.least_area[call]) * (2 if call in moved else 1), call))


def begin(t: Tables, r: SearchState, threshold: int) -> None:
    """Start a round: look for plans that end before `threshold`."""
    _clear(r, threshold)
    _enter(t, r, 0)


def _clear(r: SearchState, threshold: int) -> None:
    r.cursor[:] = -1
    r.partial.option[:] = UNDECIDED
    r.partial.relation[:] = UNDECIDED
    r.partial.overlap[:] = 1 << np.arange(len(r.order))
    r.partial.apart[:] = 0
    r.numbers[LEVEL] = 0
    r.left[LEAST_LEFT] = INFINITE
    r.numbers[THRESHOLD] = min(threshold, r.numbers[BEST])


def _enter(t: Tables, r: SearchState, num_kept: int) -> None:
    """Stand before the first call that is not kept; at the end at once, when it has no option left."""
    partial, whole = r.partial, empty_partial(t)
    partial.depth[0] = num_kept
    partial.domain[:], partial.least[:] = whole.domain, whole.least
    r.numbers[LEVEL] = r.numbers[FLOOR] = num_kept * (num_kept + 1) // 2
    if not narrow(t, partial, int(r.numbers[THRESHOLD]), r.left):
        r.numbers[LEVEL] -= 1


def begin_within(t: Tables, r: SearchState, placed: CompletePlan, num_kept: int) -> None:
    """Start a round among the plans that keep the options and relations of the first calls of the order.

    All relations of `placed` must be written, as `evaluate` does.
    """
    _clear(r, int(r.numbers[BEST]))
    kept = [int(call) for call in r.order[:num_kept]]
    for index, call in enumerate(kept):
        r.partial.option[call], r.partial.mesh[call] = placed.option[call], placed.mesh[call]
        for other in kept[:index]:
            relate(r.partial, call, other, int(placed.relation[call, other]))
    _enter(t, r, num_kept)


def lower(r: SearchState, makespan: int) -> None:
    """A plan of this makespan is known from elsewhere: look for better ones only."""
    r.numbers[BEST] = min(r.numbers[BEST], makespan)
    r.numbers[THRESHOLD] = min(r.numbers[THRESHOLD], r.numbers[BEST])


@compiled
def advance(t: Tables, r: SearchState, work: int) -> bool:
    """Go on with the round for about `work` evaluations. Returns whether it ended."""
    until = r.left[EVALUATIONS] + work
    while r.numbers[LEVEL] >= r.numbers[FLOOR] and r.left[EVALUATIONS] < until:
        level = r.numbers[LEVEL]
        call, other = r.level_call[level], r.level_other[level]
        r.partial.depth[0] = r.level_depth[level]
        if not next_alternative(t, r, level, call, other):
            r.numbers[LEVEL] -= 1
        elif admissible(t, r, level, call, other):
            if level + 1 == len(r.level_call):
                finish(t, r)
            elif r.level_other[level + 1] != GROUP or descend(t, r):
                r.cursor[level + 1] = -1
                r.numbers[LEVEL] += 1
    return r.numbers[LEVEL] < r.numbers[FLOOR]


@inner
def descend(t: Tables, r: SearchState) -> bool:
    """Go on to the next call; False when some undecided call has no class of meshes left."""
    deeper(t, r.partial)
    few = t.num_calls - r.partial.depth[0] < FEW
    return few or narrow(t, r.partial, r.numbers[THRESHOLD], r.left)


@inner
def admissible(t: Tables, r: SearchState, level: int, call: int, other: int) -> bool:
    """Whether what was just decided can be part of a plan that ends before the threshold."""
    p = r.partial
    if other < 0:
        fitting = fits_together(t, p, call) and beyond_fullest(t, p.option) == 0 and bearable(t, r, level, call)
        return fitting and (level > 0 or can_lie(t, r, call))
    relation = p.relation[call, other]
    if not possible(t, p, call, other, relation) or not relation_is_first_of_alike(r, level, call, other):
        return False
    if relation == DISJOINT:
        allowed = fits_apart(t, p, call, other)
    else:
        known = sure_to_overlap(t, p, call, other)  # then the bound is as before
        allowed = fits_together(t, p, call) and (known or bearable(t, r, level, call))
    last_of_call = level + 1 == len(r.level_call) or r.level_other[level + 1] < 0
    return allowed and (not last_of_call or can_lie(t, r, call))


@inner
def sure_to_overlap(t: Tables, p: Partial, call: int, other: int) -> bool:
    """Whether two decided calls have not the devices to lie apart."""
    sizes = t.class_size[mesh_class(t, p.option, call)] + t.class_size[mesh_class(t, p.option, other)]
    return sizes > t.num_devices


@inner
def bearable(t: Tables, r: SearchState, level: int, call: int) -> bool:
    """Whether the bound is below the threshold. Where it is for no option of this group that is as slow, skip those."""
    p = r.partial
    threshold = r.numbers[THRESHOLD]
    r.left[EVALUATIONS] += 1
    value = bound_partial(t, p, threshold)
    if value < threshold:
        return True
    r.left[LEAST_LEFT] = min(r.left[LEAST_LEFT], value)
    if r.level_other[level] == OPTION:
        value = bound_slower(t, p, call, threshold)
        if value >= threshold:
            r.left[LEAST_LEFT] = min(r.left[LEAST_LEFT], value)
            r.cursor[level] = t.option_start[call + 1]
    return False


@inner
def can_lie(t: Tables, r: SearchState, call: int) -> bool:
    """Whether the meshes decided so far can be laid out: first with the earlier ones where they are, then anew.

    Only what succeeds is kept. What takes too long to say is left to `finish`.
    """
    p = r.partial
    count = 0
    while r.order[count] != call:
        r.trial[r.order[count]] = p.mesh[r.order[count]]
        count += 1
    found = pack_meshes(t, r.order, r.places, count, count + 1, p.option, p.relation, r.trial)
    if found != LIES:
        found = pack_meshes(t, r.order, r.places, 0, count + 1, p.option, p.relation, r.trial)
    if found == LIES:
        for index in range(count + 1):
            p.mesh[r.order[index]] = r.trial[r.order[index]]
    return found != NEVER_LIES


@inner
def finish(t: Tables, r: SearchState) -> None:
    """Simulate a complete plan and all that are the same up to a permutation of calls, and keep the best.

    One that could neither be laid out nor shown not to be may exist, so its bound counts.
    """
    p = r.partial
    r.left[EVALUATIONS] += 1
    if not lies_right(t, r.order, p.option, p.relation, p.mesh):
        found = pack_meshes(t, r.order, r.places, 0, t.num_calls, p.option, p.relation, p.mesh)
        if found != LIES:
            if found != NEVER_LIES:
                r.left[LEAST_LEFT] = min(r.left[LEAST_LEFT], bound_partial(t, p, r.numbers[THRESHOLD]))
            return
    for number in range(len(r.symmetry)):
        schedule_moved(t, r, r.symmetry[number])


@inner
def schedule_moved(t: Tables, r: SearchState, goes: Ints) -> None:
    """Simulate the plan with each call in the place of the one that it goes to."""
    p, moved = r.partial, r.moved
    for call in range(t.num_calls):
        moved.option[goes[call]], moved.mesh[goes[call]] = p.option[call], p.mesh[call]
        moved.overlap[goes[call]] = 0
        for other in range(t.num_calls):
            moved.relation[goes[call], goes[other]] = p.relation[call, other]
            if call == other or p.relation[call, other] > DISJOINT:
                moved.overlap[goes[call]] |= 1 << goes[other]
    fill_durations(t, moved.option, moved.relation, t.least_size, moved.us)  # all calls are decided
    makespan = list_schedule(t, moved.us, moved.overlap, moved.agenda)
    r.left[LEAST_LEFT] = min(r.left[LEAST_LEFT], makespan)
    if makespan < r.numbers[BEST]:
        r.numbers[BEST] = makespan
        r.numbers[THRESHOLD] = min(r.numbers[THRESHOLD], makespan)
        for call in range(t.num_calls):
            r.best_option[call], r.best_mesh[call] = moved.option[call], moved.mesh[call]
