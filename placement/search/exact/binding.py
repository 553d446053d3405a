"""The binding term of a plan's bound, in words: what would have to change for a faster plan."""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.scratch import ALL_ITERATIONS, IN_ORDER, LOOP
from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.partial.complete import INFINITE
from prefect_rlhf.placement.search.partial.incumbent import Incumbent
from prefect_rlhf.placement.search.partial.partial import bound_partial, empty_partial, relate
from prefect_rlhf.placement.search.problem import ComputeNode, PlannedCall, Problem
from prefect_rlhf.placement.search.tables.tables import Tables


def binding_term(problem: Problem, t: Tables, incumbent: Incumbent | None) -> str:
    """Describe the largest term in the best plan's bound; without a plan, in the whole problem's."""
    partial = empty_partial(t)
    if incumbent is not None:
        plan = incumbent.complete_plan(t)
        partial.option[:] = plan.option
        for first in range(t.num_calls):
            for second in range(first):
                relate(partial, first, second, int(plan.relation[first, second]))
    bound_partial(t, partial, INFINITE)
    term, kept, fitting, last_kept, last_fitting = (int(word) for word in partial.scratch.binding)
    if term == LOOP:
        loop, every = _names(problem, kept, " -> "), _names(problem, fitting, " + ")
        words = f"loop: {loop}" if last_kept == 1 else f"loop: {loop}, in {last_kept} iterations"
        return f"{words}, beside {every} in each" if every else words
    if term == IN_ORDER:
        return f"{_describe(problem, kept, fitting, t.ordered_once)}, in the best order of calls on common devices"
    if term == ALL_ITERATIONS:
        return _describe(problem, kept, fitting, t.ordered_always)
    cycle = _describe(problem, kept, fitting, t.ordered_once)
    last = _describe(problem, last_kept, last_fitting, t.ordered_once)
    if not last_kept | last_fitting or cycle == last:
        return cycle
    return last if not kept | fitting else f"{cycle}; in the last iteration {last}"


def _describe(problem: Problem, kept: int, fitting: int, ordered: Ints) -> str:
    """Write K as `chain: a -> b` if its nodes wait for each other, else `device load of a + b`; A: `area of c + d`."""
    members = [node for node in range(len(problem.nodes)) if kept >> node & 1]
    is_chain = all(int(ordered[a]) >> b & 1 for a in members for b in members if a != b)
    parts = []
    if members:
        parts.append(
            f"chain: {_names(problem, kept, ' -> ')}" if is_chain else f"device load of {_names(problem, kept, ' + ')}"
        )
    if fitting:
        parts.append(f"area of {_names(problem, fitting, ' + ')} on {problem.num_devices} devices")
    return " and ".join(parts)


def _names(problem: Problem, members: int, separator: str) -> str:
    """The names of the calls and computations among the members, and the number of moves."""
    nodes = [node for index, node in enumerate(problem.nodes) if members >> index & 1]
    calls = [node.name for node in nodes if isinstance(node, PlannedCall | ComputeNode)]
    moves = len(nodes) - len(calls)
    return separator.join(calls) + (f" with {moves} move{'s' if moves > 1 else ''}" if moves else "")
