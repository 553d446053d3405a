"""Exact search by iterative deepening on the threshold: each round proves that no plan ends sooner.

A round visits the calls depth first: for each call every option, then the relation of its mesh to each earlier mesh. A
plan is left out if its meshes cannot be packed, memory overflows, or its bound is at or above the threshold. So when a
round ends, every plan that it left out takes at least LEAST_LEFT, which is the next lower bound. A call's mesh is
decided first, with a group of options (`groups`) standing for its options.

A round is a sequence of decisions: for each call k its group of options, then its relation to each of the k calls
before it. The option of a call with moves is decided after its relations, every other option after all meshes. The
cursors store each decision's current alternative, so a round can stop and continue at any point.
"""

from __future__ import annotations

import numpy as np

from prefect_rlhf.placement.search.compiled import compiled, inner
from prefect_rlhf.placement.search.exact.decisions import next_alternative
from prefect_rlhf.placement.search.exact.domains import deeper, narrow
from prefect_rlhf.placement.search.exact.search_state import (
    BEST,
    BOUNDS_ONLY,
    CURRENT,
    EVALUATIONS,
    FIRST,
    GROUP,
    LEAST_BOUND,
    LEAST_LEFT,
    OPTION,
    THRESHOLD,
    SearchState,
)
from prefect_rlhf.placement.search.partial.complete import INFINITE, CompletePlan
from prefect_rlhf.placement.search.partial.fullest import beyond_fullest
from prefect_rlhf.placement.search.partial.incumbent import Incumbent
from prefect_rlhf.placement.search.partial.packing import (
    IMPOSSIBLE,
    PACKED,
    UNKNOWN,
    Packing,
    is_packed,
    mesh_class,
    pack_meshes,
)
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
from prefect_rlhf.placement.search.tables.tables import DISJOINT, UNDECIDED, Tables, ends_of_moves

NOWHERE = -1  # the mesh of a call whose packing took too long
FEW = 2  # undecided calls for which it does not pay to narrow their domains


def decision_order(t: Tables, bounds_only: bool = False) -> list[int]:
    """Return the calls in the order of decisions: first the calls that occupy the most devices for the longest time.

    The area of a call with moves counts twice; with `bounds_only` four times if the other end of a move precedes it.
    """
    # A move takes no certain time until both ends are decided, so all decisions between them multiply. On 128 devices
    # most options of a generate call are left out only by the time of its move.
    order: list[int] = []
    ends = ends_of_moves(t)

    def weight(call: int) -> int:
        factor = 1 if not ends[call] else 4 if bounds_only and ends[call] & set(order) else 2
        return int(t.least_area[call]) * factor

    while len(order) < t.num_calls:
        order.append(max((call for call in range(t.num_calls) if call not in order), key=lambda c: (weight(c), -c)))
    return order


def begin(t: Tables, s: SearchState, threshold: int) -> None:
    """Start a round that looks for plans that end before `threshold`."""
    _clear(s, threshold)
    _enter(t, s, 0)


def _clear(s: SearchState, threshold: int) -> None:
    s.cursor[:] = -1
    s.partial.option[:] = UNDECIDED
    s.partial.relation[:] = UNDECIDED
    s.partial.overlap[:] = 1 << np.arange(len(s.order))
    s.partial.apart[:] = 0
    s.scalars[CURRENT] = 0
    s.tally[LEAST_LEFT] = s.tally[LEAST_BOUND] = INFINITE
    s.scalars[THRESHOLD] = min(threshold, s.scalars[BEST])


def _enter(t: Tables, s: SearchState, num_kept: int) -> None:
    """Go to the first call that is not kept; to the end of the round when it has no option left."""
    partial, whole = s.partial, empty_partial(t)
    partial.depth[0] = num_kept
    partial.domain[:], partial.least[:] = whole.domain, whole.least
    s.scalars[CURRENT] = s.scalars[FIRST] = num_kept * (num_kept + 1) // 2
    if not narrow(t, partial, int(s.scalars[THRESHOLD]), s.tally):
        s.scalars[CURRENT] -= 1


def begin_within(t: Tables, s: SearchState, plan: CompletePlan, num_kept: int) -> None:
    """Start a round among the plans that keep the options and relations of the first calls of the order.

    All relations of `plan` must be written, as `fill_relations` does.
    """
    _clear(s, int(s.scalars[BEST]))
    kept = [int(call) for call in s.order[:num_kept]]
    for index, call in enumerate(kept):
        s.partial.option[call], s.partial.mesh[call] = plan.option[call], plan.mesh[call]
        for other in kept[:index]:
            relate(s.partial, call, other, int(plan.relation[call, other]))
    _enter(t, s, num_kept)


def lower(s: SearchState, makespan: int) -> None:
    """Look only for plans better than `makespan`, that of a plan found by another search."""
    if makespan < s.scalars[BEST]:
        s.scalars[BEST] = makespan
        s.best_option[:] = UNDECIDED
    s.scalars[THRESHOLD] = min(s.scalars[THRESHOLD], s.scalars[BEST])


def best_plan(s: SearchState) -> Incumbent | None:
    """The best plan; None if this pass has not found it."""
    if s.best_option[0] == UNDECIDED:
        return None
    return Incumbent.from_arrays(s.scalars[BEST], s.best_option, s.best_mesh)


@compiled
def advance(t: Tables, s: SearchState, evaluations: int) -> bool:
    """Continue the round for about `evaluations` evaluations. Returns whether it ended."""
    until = s.tally[EVALUATIONS] + evaluations
    # The recursion is written as a loop over cursors: compiled code keeps no stack between two calls, and the driver
    # needs to stop after some milliseconds to check the budget and Ctrl-C.
    while s.scalars[CURRENT] >= s.scalars[FIRST] and s.tally[EVALUATIONS] < until:
        decision = s.scalars[CURRENT]
        call, other = s.decision_call[decision], s.decision_other[decision]
        s.partial.depth[0] = s.decision_depth[decision]
        if not next_alternative(t, s, decision, call, other):
            s.scalars[CURRENT] -= 1
        elif admissible(t, s, decision, call, other):
            if decision + 1 == len(s.decision_call):
                schedule(t, s)
            elif s.decision_other[decision + 1] != GROUP or descend(t, s):
                s.cursor[decision + 1] = -1
                s.scalars[CURRENT] += 1
    return s.scalars[CURRENT] < s.scalars[FIRST]


@inner
def descend(t: Tables, s: SearchState) -> bool:
    """Go on to the next call. Returns False if some undecided call has no class of meshes left."""
    deeper(t, s.partial)
    few = t.num_calls - s.partial.depth[0] < FEW
    return few or narrow(t, s.partial, s.scalars[THRESHOLD], s.tally)


@inner
def admissible(t: Tables, s: SearchState, decision: int, call: int, other: int) -> bool:
    """Whether the latest decision can be part of a plan that ends before the threshold."""
    # No option is left out because another is faster and no larger. Under list scheduling a shorter call can lengthen
    # the whole schedule (Graham's anomalies), so the best plan may contain a dominated option.
    p = s.partial
    if other < 0:
        fitting = (
            fits_together(t, p, call)
            and beyond_fullest(t, p.option, p.relation) == 0
            and is_promising(t, s, decision, call)
        )
        return fitting and (decision > 0 or can_pack(t, s, call))
    relation = p.relation[call, other]
    if not possible(t, p, call, other, relation):
        return False
    # The order of the checks is their cost: memory first, then the bound, and packing only after a call's last
    # relation. Disjoint meshes and forced overlaps leave the bound as it was, so they need no evaluation.
    if relation == DISJOINT:
        allowed = fits_apart(t, p, call, other)
    else:
        same_bound = is_forced_overlap(t, p, call, other)
        allowed = fits_together(t, p, call) and (same_bound or is_promising(t, s, decision, call))
    last_of_call = decision + 1 == len(s.decision_call) or s.decision_other[decision + 1] < 0
    return allowed and (not last_of_call or can_pack(t, s, call))


@inner
def is_forced_overlap(t: Tables, p: Partial, call: int, other: int) -> bool:
    """Whether two decided calls need more devices than exist to be disjoint."""
    sizes = t.class_size[mesh_class(t, p.option, call)] + t.class_size[mesh_class(t, p.option, other)]
    return sizes > t.num_devices


@inner
def is_promising(t: Tables, s: SearchState, decision: int, call: int) -> bool:
    """Whether the bound is below the threshold. If not, also skips options that are no faster."""
    p = s.partial
    threshold = s.scalars[THRESHOLD]
    s.tally[EVALUATIONS] += 1
    value = bound_partial(t, p, threshold)
    if value < threshold:
        return True
    # LEAST_LEFT becomes a lower bound on all plans, so each pruned plan must enter with a value that it cannot beat.
    s.tally[LEAST_LEFT] = min(s.tally[LEAST_LEFT], value)
    # Options of a group are sorted by time, and `bound_slower` holds for all that are no faster. If it reaches the
    # threshold, the cursor skips them. Unlike dominance this is safe: a bound shows that each of them is too slow.
    if s.decision_other[decision] == OPTION:
        value = bound_slower(t, p, call, threshold)
        if value >= threshold:
            s.tally[LEAST_LEFT] = min(s.tally[LEAST_LEFT], value)
            s.cursor[decision] = t.option_start[call + 1]
    return False


@inner
def can_pack(t: Tables, s: SearchState, call: int) -> bool:
    """Whether the meshes decided so far can be packed: first with the earlier meshes unchanged, then from the start.

    Only a successful packing is kept. A packing that takes too long is left to `schedule`.
    """
    # Relations determine times and memory, so positions matter only for existence: any packing will do, and the
    # packing of the earlier calls is tried first because it mostly extends. UNKNOWN may not prune, since the plan may
    # exist; the mesh NOWHERE makes the next packing start anew.
    p = s.partial
    count, result = 0, UNKNOWN
    while s.order[count] != call:
        s.trial[s.order[count]] = p.mesh[s.order[count]]
        count += 1
    packing = Packing(s.order, p.option, p.relation, s.trial)
    if all_placed(s, count):
        result = pack_meshes(t, packing, s.pack_cursor, count, count + 1)
    if result != PACKED:
        result = pack_meshes(t, packing, s.pack_cursor, 0, count + 1)
    if result == PACKED:
        for index in range(count + 1):
            p.mesh[s.order[index]] = s.trial[s.order[index]]
    else:
        p.mesh[call] = NOWHERE
    return result != IMPOSSIBLE


@inner
def all_placed(s: SearchState, count: int) -> bool:
    """Whether the order's first calls have meshes in the classes of their options."""
    for index in range(count):  # noqa: SIM110 - no generators in compiled code
        if s.partial.mesh[s.order[index]] == NOWHERE:
            return False
    return True


@inner
def schedule(t: Tables, s: SearchState) -> None:
    """Schedule a complete plan, and keep it if it is the best so far.

    A plan that could neither be packed nor shown impossible may exist, so its bound counts.
    """
    p = s.partial
    s.tally[EVALUATIONS] += 1
    packing = Packing(s.order, p.option, p.relation, p.mesh)
    if not (all_placed(s, t.num_calls) and is_packed(t, packing)):
        result = pack_meshes(t, packing, s.pack_cursor, 0, t.num_calls)
        if result == UNKNOWN:
            s.tally[LEAST_LEFT] = min(s.tally[LEAST_LEFT], bound_partial(t, p, s.scalars[THRESHOLD]))
        if result != PACKED:
            return
    us = bound = bound_partial(t, p, INFINITE)
    if s.scalars[BOUNDS_ONLY] == 0:
        us = max(bound, t.rule.schedule(t.rule, t, p.option, p.relation, p.us, p.overlap))
    take_if_better(t, s, bound, us)


@inner
def take_if_better(t: Tables, s: SearchState, bound: int, us: int) -> None:
    """Keep a plan that takes `us`, but no less than `bound`, if it is the best so far."""
    s.tally[LEAST_BOUND] = min(s.tally[LEAST_BOUND], t.rule.least_in_any_order(bound, us))
    s.tally[LEAST_LEFT] = min(s.tally[LEAST_LEFT], us)
    if us < s.scalars[BEST]:
        s.scalars[BEST] = us
        s.scalars[THRESHOLD] = min(s.scalars[THRESHOLD], us)
        for call in range(t.num_calls):
            s.best_option[call], s.best_mesh[call] = s.partial.option[call], s.partial.mesh[call]
