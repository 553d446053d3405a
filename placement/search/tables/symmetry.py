"""Symmetries: permutations of the calls that do not change the problem.

Calls with equal options and the same predecessors and successors (several reward models) can be swapped. So can pairs
of them together with the moves between them (two critics, each with its inference and its training). Plans that differ
only by such a permutation have the same bound. Their times differ only by the order of nodes, which decides ties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from prefect_rlhf.placement.search.problem import (
    Edge,
    LinkNode,
    PairNode,
    PlannedCall,
    Problem,
    ProblemNode,
    calls_of,
)

Permutation = tuple[int, ...]  # of the calls
MOST_PERMUTATIONS = 24  # all complete plans of a class are scheduled, so their number is limited


def symmetries(problem: Problem) -> list[Permutation]:
    """A group of permutations, the identity first: [call] -> the call in whose place it goes."""
    # Swaps are added while the group they generate stays small: each complete plan is scheduled once per permutation.
    # A swap that is left out costs only time, because any subgroup is a valid set of symmetries. `not_before` needs a
    # group, not just a set of swaps: its argument composes permutations.
    identity = tuple(range(len(problem.calls)))
    group = {identity}
    for swap in _swaps(problem):
        larger = _closure(group | {swap})
        if len(larger) <= MOST_PERMUTATIONS:
            group = larger
    return [identity, *sorted(group - {identity})]


def _closure(group: set[Permutation]) -> set[Permutation]:
    """The closure under products, or more than MOST_PERMUTATIONS of its members if it is larger than that."""
    while len(group) <= MOST_PERMUTATIONS:
        products = {tuple(a[place] for place in b) for a in group for b in group}
        if products <= group:
            break
        group = group | products
    return group


def node_permutation(problem: Problem, goes: Permutation) -> list[int] | None:
    """The permutation of the nodes when the calls go as `goes` says; None when a node has no place to go."""
    names = [call.name for call in problem.calls]
    moved = {name: names[place] for name, place in zip(names, goes, strict=True)}
    places = {key: index for index, key in enumerate(_keys(problem, {name: name for name in names}))}
    keys = list(_keys(problem, moved))
    return [places[key] for key in keys] if set(keys) <= set(places) else None


def _keys(problem: Problem, moved: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """The keys of all nodes: the kind of node, its calls, as moved, and its number among the nodes of these calls."""
    seen: Counter[tuple[str, ...]] = Counter()
    for node in problem.nodes:
        key = type(node).__name__, *(moved[name] for name in calls_of(node))
        yield *key, str(seen[key])
        seen[key] += 1


def _swaps(problem: Problem) -> Iterator[Permutation]:
    """Exchanges of two calls, alone or with another pair, that do not change the problem."""
    # A call with moves cannot be swapped alone: a critic's weights move to its own inference. So the swap of a pair is
    # tried alone first, then together with each later pair; the first exchange that keeps the problem is taken.
    calls = problem.calls
    alike = [(a, b) for a, b in combinations(range(len(calls)), 2) if _alike(calls[a], calls[b])]
    for index, pair in enumerate(alike):
        for other in [pair, *alike[index + 1 :]]:
            swap = _exchange(len(calls), {pair, other})
            if swap is not None and _keeps(problem, swap):
                yield swap
                break


def _alike(first: PlannedCall, second: PlannedCall) -> bool:
    """Whether two calls have equal options; options that name a copy are not looked into."""
    return first.options == second.options and all(option.copy is None for option in first.options)


def _exchange(count: int, pairs: set[tuple[int, int]]) -> Permutation | None:
    """The permutation of `count` calls that swaps these pairs; None if a call is in several of them."""
    goes = list(range(count))
    for a, b in pairs:
        if (goes[a], goes[b]) != (a, b):
            return None
        goes[a], goes[b] = b, a
    return tuple(goes)


def _keeps(problem: Problem, swap: Permutation) -> bool:
    """Whether a swap maps nodes to equal nodes, dependencies to dependencies, and each role's calls to a role's."""
    roles = [call.role for call in problem.calls]
    pairs = combinations(range(len(roles)), 2)
    if any((roles[a] == roles[b]) != (roles[swap[a]] == roles[swap[b]]) for a, b in pairs):
        return False
    goes = node_permutation(problem, swap)
    if goes is None or not all(_same(node, problem.nodes[goes[index]]) for index, node in enumerate(problem.nodes)):
        return False
    moved = {node.name: problem.nodes[goes[index]].name for index, node in enumerate(problem.nodes)}
    edges = set(problem.edges)
    return {_moved(edge, moved) for edge in edges} == edges


def _moved(edge: Edge, moved: Mapping[str, str]) -> Edge:
    without = None if edge.without is None else moved[edge.without]
    return Edge(moved[edge.source], moved[edge.target], edge.lag, without)


def _same(first: ProblemNode, second: ProblemNode) -> bool:
    if isinstance(first, PairNode) and isinstance(second, PairNode):
        return first.occupies == second.occupies and np.array_equal(first.by_option, second.by_option)
    if isinstance(first, LinkNode) and isinstance(second, LinkNode):
        return (first.occupies, first.microseconds) == (second.occupies, second.microseconds)
    return True  # calls that change places are alike


def not_before(group: Sequence[Permutation], order: Sequence[int]) -> list[int]:
    """The set, for each call, of calls earlier in `order` whose choice may not come after its own.

    Among the plans that differ only by a permutation, there is a plan with this property at each place of the order:
    consider the permutations that keep all earlier calls, and the calls that they could move to the place. The call
    there has the first choice among them.
    """
    # This is the usual way to break symmetry with a stabiliser chain: at each place, only permutations that fix all
    # earlier calls matter. If such a permutation moves `call` to a later call, the two could change places, and the
    # search keeps only the plan in which `call` has the first choice. At least a plan of each class survives, so no
    # makespan is lost.
    earlier = [0] * len(order)
    for index, call in enumerate(order):
        kept = order[:index]
        for goes in group:
            if all(goes[before] == before for before in kept) and goes[call] != call:
                earlier[goes[call]] |= 1 << call
    return earlier
