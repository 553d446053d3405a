"""Calls that can change places: permutations of the calls after which the problem is the same.

Calls of equal options that wait for the same and are waited for by the same (several reward models) can be swapped, and
so can pairs of them with the moves between (two critics, each scoring and being trained). Makespans then differ only by
whom ties favour, so one bound that leaves these ties open holds for all plans that are the same up to a permutation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from prefect_rlhf.placement.search.problem import Edge, LinkNode, PairNode, PlannedCall, Problem, ProblemNode

Permutation = tuple[int, ...]  # of the calls
MOST = 24  # permutations: of so many the complete plans are all scheduled


def symmetries(problem: Problem) -> list[Permutation]:
    """A group of permutations, the identity first: [call] -> the call in whose place it goes."""
    identity = tuple(range(len(problem.calls)))
    group = {identity}
    for swap in _swaps(problem):
        larger = _closure(group | {swap})
        if len(larger) <= MOST:
            group = larger
    return [identity, *sorted(group - {identity})]


def _closure(group: set[Permutation]) -> set[Permutation]:
    """All products; some more than MOST when there are so many."""
    while len(group) <= MOST:
        products = {tuple(a[place] for place in b) for a in group for b in group}
        if products <= group:
            break
        group = group | products
    return group


def of_nodes(problem: Problem, goes: Permutation) -> list[int] | None:
    """[node] -> the node in whose place it goes when the calls go as `goes` says; None when one has no place to go."""
    names = [call.name for call in problem.calls]
    moved = {name: names[place] for name, place in zip(names, goes, strict=True)}
    places = {key: index for index, key in enumerate(_keys(problem, {name: name for name in names}))}
    keys = list(_keys(problem, moved))
    return [places[key] for key in keys] if set(keys) <= set(places) else None


def _keys(problem: Problem, moved: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """What tells each node from all others: its calls, as moved, and which of the nodes of these calls it is."""
    seen: Counter[tuple[str, ...]] = Counter()
    for node in problem.nodes:
        key = type(node).__name__, *(moved[name] for name in _calls_of(node))
        yield *key, str(seen[key])
        seen[key] += 1


def _calls_of(node: ProblemNode) -> tuple[str, ...]:
    if isinstance(node, PairNode):
        return node.first, node.second
    return (node.name,) if isinstance(node, PlannedCall) else (node.call,)


def _swaps(problem: Problem) -> Iterator[Permutation]:
    """Exchanges of two calls, alone or with one other pair, after which the problem is the same."""
    calls = problem.calls
    alike = [pair for pair in combinations(range(len(calls)), 2) if _alike(calls[pair[0]], calls[pair[1]])]
    for index, pair in enumerate(alike):
        for other in [pair, *alike[index + 1 :]]:
            swap = _exchange(len(calls), {pair, other})
            if swap is not None and _keeps(problem, swap):
                yield swap
                break


def _alike(first: PlannedCall, second: PlannedCall) -> bool:
    """Options that name a copy are not looked into."""
    return first.options == second.options and all(option.copy is None for option in first.options)


def _exchange(count: int, pairs: set[tuple[int, int]]) -> Permutation | None:
    """None when a call is in more than one of the pairs."""
    found = list(range(count))
    for a, b in pairs:
        if (found[a], found[b]) != (a, b):
            return None
        found[a], found[b] = b, a
    return tuple(found)


def _keeps(problem: Problem, swap: Permutation) -> bool:
    """Whether every node has its equal in the place where it goes, and everything waits for the same."""
    goes = of_nodes(problem, swap)
    if goes is None or not all(_same(node, problem.nodes[goes[index]]) for index, node in enumerate(problem.nodes)):
        return False
    moved = {node.name: problem.nodes[goes[index]].name for index, node in enumerate(problem.nodes)}
    edges = set(problem.edges)
    return {Edge(moved[edge.source], moved[edge.target], edge.lag) for edge in edges} == edges


def _same(first: ProblemNode, second: ProblemNode) -> bool:
    if isinstance(first, PairNode) and isinstance(second, PairNode):
        return first.occupies == second.occupies and np.array_equal(first.microseconds, second.microseconds)
    if isinstance(first, LinkNode) and isinstance(second, LinkNode):
        return first.microseconds == second.microseconds
    return True  # calls that change places are alike


def not_before(group: Sequence[Permutation], order: Sequence[int]) -> list[int]:
    """For each call the set of earlier ones in `order` whose choice may not come after its own.

    Of all plans that are the same up to a permutation, one has at each place in the order the first choice of those
    that the permutations that keep all calls before could put there.
    """
    found = [0] * len(order)
    for index, call in enumerate(order):
        kept = order[:index]
        for one in group:
            if all(one[before] == before for before in kept) and one[call] != call:
                found[one[call]] |= 1 << call
    return found


def wins_ties(group: Sequence[Sequence[int]]) -> list[list[bool]]:
    """[a, b]: whether node a goes before b when both become ready at once: by number, in all permutations of nodes."""
    nodes = range(len(group[0]))
    return [[all(goes[a] < goes[b] for goes in group) for b in nodes] for a in nodes]
