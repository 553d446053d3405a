"""Calls that can change places: permutations of the calls after which the problem is the same.

Calls of equal options that wait for the same and are waited for by the same (several reward models) can be swapped, and
so can pairs of them with the moves between (two critics, each scoring and being trained). Makespans then differ only by
whom ties favour, so one bound holds for all plans that are the same up to such a permutation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from prefect_rlhf.placement.search.problem import Edge, LinkNode, PairNode, PlannedCall, Problem

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
    names = [call.name for call in problem.calls]
    goes = {name: names[place] for name, place in zip(names, swap, strict=True)}
    for node in problem.nodes:
        if isinstance(node, LinkNode) and goes[node.call] != node.call:
            return False
    moves = [node for node in problem.nodes if isinstance(node, PairNode)]
    for move in moves:
        ends = goes[move.first], goes[move.second]
        if ends != (move.first, move.second):
            own = [other for other in moves if (other.first, other.second) == (move.first, move.second)]
            theirs = [other for other in moves if (other.first, other.second) == ends]
            place = next(index for index, other in enumerate(own) if other is move)
            if len(own) != len(theirs) or not _same(move, theirs[place]):
                return False
            goes[move.name] = theirs[place].name
    edges = set(problem.edges)
    return {_moved(edge, goes) for edge in edges} == edges


def _same(first: PairNode, second: PairNode) -> bool:
    return first.occupies == second.occupies and np.array_equal(first.microseconds, second.microseconds)


def _moved(edge: Edge, goes: dict[str, str]) -> Edge:
    return Edge(goes.get(edge.source, edge.source), goes.get(edge.target, edge.target), edge.lag)


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
