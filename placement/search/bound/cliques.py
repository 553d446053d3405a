"""The heaviest set of nodes that exclude each other pairwise; sets are integers of bits."""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import Ints, compiled, inner, lowest

STACK = 3 * 64


@inner
def sum_over(weights: Ints, members: int) -> int:
    """The sum of a set's weights."""
    total = 0
    while members:
        total += weights[lowest(members)]
        members &= members - 1
    return total


@compiled
def heaviest_clique(adjacent: Ints, weights: Ints, candidates: int, stack: Ints) -> tuple[int, int]:
    """Weight and members of the heaviest clique among `candidates`. `adjacent[v]` is the set of v's neighbours.

    Branch and bound: include the first candidate, or exclude it if another candidate is not adjacent to it. Weights are
    0 or more. `stack` has room for STACK numbers: choices to return to, each as candidates, members, weight.

    >>> import numpy as np
    >>> path = np.array([0b010, 0b101, 0b010])  # 0 - 1 - 2
    >>> heaviest_clique(path, np.array([3, 1, 4]), 0b111, np.zeros(STACK, dtype=np.int64))
    (5, 6)
    """
    best, best_members = 0, 0
    members, weight, depth = 0, 0, 0
    while True:
        while candidates and weight + sum_over(weights, candidates) > best:
            node = lowest(candidates)
            candidates &= candidates - 1
            if candidates & ~adjacent[node]:
                stack[depth], stack[depth + 1], stack[depth + 2] = candidates, members, weight
                depth += 3
            candidates &= adjacent[node]
            members |= 1 << node
            weight += weights[node]
        if weight > best:
            best, best_members = weight, members
        if depth == 0:
            return best, best_members
        depth -= 3
        candidates, members, weight = stack[depth], stack[depth + 1], stack[depth + 2]
