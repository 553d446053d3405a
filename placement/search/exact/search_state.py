"""The state of a depth-first pass of the exact search: its decisions, the best plan so far, the lowest bound left
out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.partial.complete import INFINITE
from prefect_rlhf.placement.search.partial.partial import Partial, empty_partial
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.tables import UNDECIDED, Tables, calls_with_moves

LARGE = 0.5  # of a device's memory
GROUP, OPTION = -1, -2  # decisions about a call alone
CURRENT, FIRST, THRESHOLD, BEST, BOUNDS_ONLY = range(5)  # places in `SearchState.scalars`
LEAST_LEFT, EVALUATIONS, LEAST_BOUND = range(3)  # places in `SearchState.tally`


@dataclass(frozen=True, slots=True, eq=False)
class SearchState(Record):
    """A depth-first pass of D decisions; arrays are changed in place.

    In the tally, LEAST_LEFT is the least bound or time of all plans that this round left out, and EVALUATIONS counts
    the evaluations of all rounds. LEAST_BOUND is a lower bound on the plans scheduled in this round, if the rule allows
    another order of their nodes: such a plan might take only as long as its bound.
    """

    order: Ints  # [C]: calls, the most decisive first
    decision_call: Ints  # [D]
    decision_depth: Ints  # [D]: calls before it
    decision_other: Ints  # [D]: the earlier call that a relation is with; or GROUP or OPTION
    group: Ints  # [C]: the group of the call's option
    cursor: Ints  # [D]: the alternative that each decision is at
    partial: Partial
    pack_cursor: Ints  # [C]: scratch of `pack_meshes`
    trial: Ints  # [C]: meshes that it tries
    best_option: Ints  # [C]
    best_mesh: Ints  # [C]
    scalars: Ints  # [5]: present and first free decision, threshold, best time, whether plans take their bounds
    tally: Ints  # [3]: see above


def empty_search_state(t: Tables, order: Sequence[int], num_kept: int = 0) -> SearchState:
    """Return the state before the first round: no plan, no threshold. The first `num_kept` calls of the order stay as
    they are.
    """
    decisions = list(_decisions(t, order, num_kept))
    return SearchState(
        order=np.array(order, dtype=np.int64),
        decision_call=np.array([call for call, _, _ in decisions], dtype=np.int64),
        decision_depth=np.array([depth for _, _, depth in decisions], dtype=np.int64),
        decision_other=np.array([other for _, other, _ in decisions], dtype=np.int64),
        group=np.zeros(t.num_calls, dtype=np.int64),
        cursor=np.full(len(decisions), -1, dtype=np.int64),
        partial=empty_partial(t),
        pack_cursor=np.zeros(t.num_calls, dtype=np.int64),
        trial=np.zeros(t.num_calls, dtype=np.int64),
        best_option=np.full(t.num_calls, UNDECIDED, dtype=np.int64),
        best_mesh=np.full(t.num_calls, UNDECIDED, dtype=np.int64),
        scalars=np.array([0, 0, 0, INFINITE, 0], dtype=np.int64),
        tally=np.array([INFINITE, 0, INFINITE], dtype=np.int64),
    )


def _decisions(t: Tables, order: Sequence[int], num_kept: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each decision the call, the earlier call or GROUP or OPTION, and the number of calls before.

    The time of weight moves, and the models that fit next to a large model, depend on the options. So the options of
    calls with moves or large models are decided at once.
    """
    at_once = calls_with_moves(t)
    at_once |= {call for call in order if _fastest_bytes(t, call) > LARGE * t.most_bytes}
    for depth, call in enumerate(order):
        options = [OPTION] if call in at_once and depth >= num_kept else []
        yield from ((call, other, depth) for other in [GROUP, *_decisive_first(t, call, order[:depth]), *options])
    yield from ((call, OPTION, len(order)) for call in order[num_kept:] if call not in at_once)


def _decisive_first(t: Tables, call: int, others: Sequence[int]) -> list[int]:
    """Order the earlier calls: first calls that are independent of this call, the longest first.

    If such calls overlap they delay each other, so these relations decide most.
    """
    ordered = int(t.ordered_once[t.node_of[call]])
    return sorted(others, key=lambda other: (ordered >> int(t.node_of[other]) & 1, -int(t.least_area[other])))


def _fastest_bytes(t: Tables, call: int) -> int:
    """The most bytes that the fastest option on some class of meshes takes."""
    first = t.option_start[call]
    fastest = first + t.member[t.member_start[t.group_start[call] : t.option_start[call + 1]]]
    return int((t.option_static[fastest] + t.option_active[fastest]).max())
