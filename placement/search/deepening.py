"""Exact search by iterative deepening on the threshold: each round proves that no plan ends sooner.

A round goes depth first through the calls: for each every option, then how its mesh lies to each earlier one's. What
cannot be laid out, overflows memory, or has a bound at or above the threshold is left. So when a round ends, every plan
that it left takes at least `least_left`: the next lower bound. Options are never left out for being slower and no
smaller than others: under list scheduling a shorter call can lengthen the makespan (Graham's anomalies), so the best
plan could be among them.

A round is a sequence of decisions (levels): for call k its option, then its relation to each of the k calls before. The
cursors say which alternative each level is at, so a round can stop anywhere and go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.compiled import compiled, inner
from prefect_rlhf.placement.search.domains import deeper, narrow
from prefect_rlhf.placement.search.lay_out import LIES, NEVER_LIES, lay_out, lies_right
from prefect_rlhf.placement.search.partial import (
    Partial,
    bound_partial,
    bound_slower,
    empty_partial,
    fits_apart,
    fits_together,
    possible,
    relate,
)
from prefect_rlhf.placement.search.placed import Placed
from prefect_rlhf.placement.search.simulate import Agenda, agenda_for, fill_durations, list_schedule
from prefect_rlhf.placement.search.tables import DISJOINT, EQUAL, UNDECIDED, Ints, Tables

INFINITE = 1 << 62
FEW = 2  # undecided calls for which it does not pay to narrow their domains


class Round(NamedTuple):
    """One depth-first pass; arrays are changed in place."""

    order: Ints  # [C]: calls, the most decisive first
    sorted_options: Ints  # options of each call by mesh class, then duration, at option_start
    last_of_class: Ints  # for each of these, where in the call's order the last of its class stands
    level_call: Ints  # [L]
    level_depth: Ints  # [L]: calls before it
    level_other: Ints  # [L]: the earlier call that a relation is with; UNDECIDED where the level is an option
    cursor: Ints  # [L]
    partial: Partial
    agenda: Agenda
    places: Ints  # [C]: scratch of `lay_out`
    trial: Ints  # [C]: meshes that it tries
    best_option: Ints  # [C]
    best_mesh: Ints  # [C]
    left: Ints  # [2]: see below
    numbers: Ints  # see below


LEVEL, FLOOR, THRESHOLD, BEST = range(4)  # what stands where in `Round.numbers`
LEAST_LEFT, EVALUATIONS = range(2)  # and in `Round.left`


def empty_round(t: Tables, order: Sequence[int]) -> Round:
    """Before the first round: no plan known, no threshold."""
    levels = [(call, other, k) for k, call in enumerate(order) for other in [UNDECIDED, *order[:k]]]
    spans = [slice(t.option_start[call], t.option_start[call + 1]) for call in range(t.num_calls)]
    by_duration = [np.lexsort((t.option_cost[span], t.option_class[span])) for span in spans]
    classes = [t.option_class[span][sorted] for span, sorted in zip(spans, by_duration, strict=True)]
    return Round(
        order=np.array(order, dtype=np.int64),
        sorted_options=np.concatenate(by_duration).astype(np.int64),
        last_of_class=np.concatenate([np.searchsorted(found, found, side="right") - 1 for found in classes]),
        level_call=np.array([call for call, _, _ in levels], dtype=np.int64),
        level_depth=np.array([depth for _, _, depth in levels], dtype=np.int64),
        level_other=np.array([other for _, other, _ in levels], dtype=np.int64),
        cursor=np.full(len(levels), -1, dtype=np.int64),
        partial=empty_partial(t),
        agenda=agenda_for(t),
        places=np.zeros(t.num_calls, dtype=np.int64),
        trial=np.zeros(t.num_calls, dtype=np.int64),
        best_option=np.full(t.num_calls, UNDECIDED, dtype=np.int64),
        best_mesh=np.full(t.num_calls, UNDECIDED, dtype=np.int64),
        left=np.array([INFINITE, 0], dtype=np.int64),
        numbers=np.array([0, 0, 0, INFINITE], dtype=np.int64),
    )


def decision_order(t: Tables) -> list[int]:
    """Calls in the order in which to decide them: those first that take most devices for longest."""
    return sorted(range(t.num_calls), key=lambda call: (-int(t.least_area[call]), call))


def begin(t: Tables, r: Round, threshold: int) -> None:
    """Start a round: look for plans that end before `threshold`."""
    _clear(r, threshold)
    _enter(t, r, 0)


def _clear(r: Round, threshold: int) -> None:
    r.cursor[:] = -1
    r.partial.option[:] = UNDECIDED
    r.partial.relation[:] = UNDECIDED
    r.partial.overlap[:] = 1 << np.arange(len(r.order))
    r.partial.apart[:] = 0
    r.numbers[LEVEL] = 0
    r.left[LEAST_LEFT] = INFINITE
    r.numbers[THRESHOLD] = min(threshold, r.numbers[BEST])


def _enter(t: Tables, r: Round, num_kept: int) -> None:
    """Stand before the first call that is not kept; at the end at once, when it has no option left."""
    partial, whole = r.partial, empty_partial(t)
    partial.depth[0] = num_kept
    partial.domain[:], partial.least[:] = whole.domain, whole.least
    r.numbers[LEVEL] = r.numbers[FLOOR] = num_kept * (num_kept + 1) // 2
    if not narrow(t, partial, int(r.numbers[THRESHOLD]), r.left):
        r.numbers[LEVEL] -= 1


def begin_within(t: Tables, r: Round, placed: Placed, num_kept: int) -> None:
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


def lower(r: Round, makespan: int) -> None:
    """A plan of this makespan is known from elsewhere: look for better ones only."""
    r.numbers[BEST] = min(r.numbers[BEST], makespan)
    r.numbers[THRESHOLD] = min(r.numbers[THRESHOLD], r.numbers[BEST])


@compiled
def advance(t: Tables, r: Round, work: int) -> bool:
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
            elif r.level_other[level + 1] != UNDECIDED or descend(t, r):
                r.cursor[level + 1] = -1
                r.numbers[LEVEL] += 1
    return r.numbers[LEVEL] < r.numbers[FLOOR]


@inner
def descend(t: Tables, r: Round) -> bool:
    """Go on to the next call; False when some undecided call has no class of meshes left."""
    deeper(t, r.partial)
    few = t.num_calls - r.partial.depth[0] < FEW
    return few or narrow(t, r.partial, r.numbers[THRESHOLD], r.left)


@inner
def next_alternative(t: Tables, r: Round, level: int, call: int, other: int) -> bool:
    """Take the next alternative of a level. With none left, undecide it and return False."""
    p = r.partial
    r.cursor[level] += 1
    if other == UNDECIDED:
        domain = p.domain[p.depth[0]]
        while r.cursor[level] < t.option_start[call + 1] - t.option_start[call]:
            option = r.sorted_options[t.option_start[call] + r.cursor[level]]
            place = t.size_place[t.option_class[t.option_start[call] + option]]
            if domain[0, call] <= place <= domain[1, call]:
                p.option[call] = option
                return True
            r.cursor[level] = r.last_of_class[t.option_start[call] + r.cursor[level]] + 1
        p.option[call] = UNDECIDED
        return False
    if r.cursor[level] > EQUAL:
        relate(p, call, other, UNDECIDED)
        return False
    relate(p, call, other, r.cursor[level])
    return True


@inner
def admissible(t: Tables, r: Round, level: int, call: int, other: int) -> bool:
    """Whether what was just decided can be part of a plan that ends before the threshold."""
    p = r.partial
    if other == UNDECIDED:
        fitting = fits_together(t, p, call) and bearable(t, r, level, call)
        return fitting and (level > 0 or can_lie(t, r, call))
    relation = p.relation[call, other]
    if not possible(t, p, call, other, relation):
        return False
    if relation == DISJOINT:
        allowed = fits_apart(t, p, call, other)
    else:
        allowed = fits_together(t, p, call) and bearable(t, r, level, call)
    last_of_call = level + 1 == len(r.level_call) or r.level_other[level + 1] == UNDECIDED
    return allowed and (not last_of_call or can_lie(t, r, call))


@inner
def bearable(t: Tables, r: Round, level: int, call: int) -> bool:
    """Whether the bound is below the threshold. Where it is for no option of this class that is as slow, skip those."""
    p = r.partial
    threshold = r.numbers[THRESHOLD]
    r.left[EVALUATIONS] += 1
    value = bound_partial(t, p, threshold)
    if value < threshold:
        return True
    r.left[LEAST_LEFT] = min(r.left[LEAST_LEFT], value)
    if r.level_other[level] == UNDECIDED:
        value = bound_slower(t, p, call, threshold)
        if value >= threshold:
            r.left[LEAST_LEFT] = min(r.left[LEAST_LEFT], value)
            r.cursor[level] = r.last_of_class[t.option_start[call] + r.cursor[level]]
    return False


@inner
def can_lie(t: Tables, r: Round, call: int) -> bool:
    """Whether the meshes decided so far can be laid out: first with the earlier ones where they are, then anew.

    Only what succeeds is kept. What takes too long to say is left to `finish`.
    """
    p = r.partial
    count = 0
    while r.order[count] != call:
        r.trial[r.order[count]] = p.mesh[r.order[count]]
        count += 1
    found = lay_out(t, r.order, r.places, count, count + 1, p.option, p.relation, r.trial)
    if found != LIES:
        found = lay_out(t, r.order, r.places, 0, count + 1, p.option, p.relation, r.trial)
    if found == LIES:
        for index in range(count + 1):
            p.mesh[r.order[index]] = r.trial[r.order[index]]
    return found != NEVER_LIES


@inner
def finish(t: Tables, r: Round) -> None:
    """Simulate a complete plan, and keep it if it is the best.

    One that could neither be laid out nor shown not to be may exist, so its bound counts.
    """
    p = r.partial
    r.left[EVALUATIONS] += 1
    if not lies_right(t, r.order, p.option, p.relation, p.mesh):
        r.left[LEAST_LEFT] = min(r.left[LEAST_LEFT], bound_partial(t, p, r.numbers[THRESHOLD]))
        return
    fill_durations(t, p.option, p.relation, t.least_size, p.us)  # all calls are decided
    makespan = list_schedule(t, p.us, p.overlap, r.agenda)
    r.left[LEAST_LEFT] = min(r.left[LEAST_LEFT], makespan)
    if makespan < r.numbers[BEST]:
        r.numbers[BEST] = makespan
        r.numbers[THRESHOLD] = min(r.numbers[THRESHOLD], makespan)
        for call in range(t.num_calls):
            r.best_option[call], r.best_mesh[call] = p.option[call], p.mesh[call]
