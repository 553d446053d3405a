"""Which term of the bound binds a plan, in words: what would have to change for the plan to get faster."""

from __future__ import annotations

import numpy as np

from prefect_rlhf.placement.search.bound.scratch import ALL_ITERATIONS
from prefect_rlhf.placement.search.exact.search_state import INFINITE
from prefect_rlhf.placement.search.partial.complete import CompletePlan
from prefect_rlhf.placement.search.partial.incumbent import Incumbent
from prefect_rlhf.placement.search.partial.partial import Partial, bound_partial, empty_partial, relate
from prefect_rlhf.placement.search.problem import PlannedCall, Problem
from prefect_rlhf.placement.search.tables.tables import Tables


def binding_term(problem: Problem, t: Tables, incumbent: Incumbent | None) -> str:
    """The largest term of the bound of the best plan; without a plan, of the problem as a whole."""
    partial = empty_partial(t) if incumbent is None else _partial(t, incumbent.placed(t))
    bound_partial(t, partial, INFINITE)
    term, kept, fitting, last_kept, last_fitting = (int(word) for word in partial.explain)
    if term == ALL_ITERATIONS:
        return _in_words(problem, t, partial, kept, fitting, t.ordered_always)
    loop = _in_words(problem, t, partial, kept, fitting, t.ordered_once)
    last = _in_words(problem, t, partial, last_kept, last_fitting, t.ordered_once)
    return last if not kept | fitting or loop == last else f"{loop}; in the last iteration {last}"


def _partial(t: Tables, placed: CompletePlan) -> Partial:
    partial = empty_partial(t)
    partial.option[:] = placed.option
    for first in range(t.num_calls):
        for second in range(first):
            relate(partial, first, second, int(placed.relation[first, second]))
    return partial


def _in_words(
    problem: Problem,
    t: Tables,
    partial: Partial,
    kept: int,
    fitting: int,
    ordered: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> str:
    """`chain: a -> b` where nodes wait for each other, `device load of a + b` where not, `area of c + d`."""
    members = [node for node in range(t.num_nodes) if kept >> node & 1]
    is_chain = all(int(ordered[a]) >> b & 1 for a in members for b in members if a != b)
    parts = []
    if members:
        parts.append(
            f"chain: {_names(problem, kept, ' -> ')}" if is_chain else f"device load of {_names(problem, kept, ' + ')}"
        )
    if fitting:
        parts.append(f"area of {_names(problem, fitting, ' + ')} on {t.num_devices} devices")
    return " and ".join(parts)


def _names(problem: Problem, members: int, separator: str) -> str:
    """The calls among the members; moves are counted."""
    nodes = [node for index, node in enumerate(problem.nodes) if members >> index & 1]
    calls = [node.name for node in nodes if isinstance(node, PlannedCall)]
    moves = len(nodes) - len(calls)
    return separator.join(calls) + (f" with {moves} move{'s' if moves > 1 else ''}" if moves else "")
