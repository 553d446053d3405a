"""How long nodes take at least of which some exclude each other, compiled.

A set of nodes that exclude each other pairwise (a clique) runs one after the other. So while a clique K runs, nothing
runs that all of K excludes; if A is a set of such nodes, the time besides K must have room for the area of A: each
node's duration times the devices that it occupies. With D devices,

    seconds >= weight(K) + area(A) / D                                                                    (*)
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.cliques import heaviest_clique, sum_over
from prefect_rlhf.placement.search.bound.scratch import Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest


@inner
def heaviest_work(us: Ints, area: Ints, s: Scratch, nodes: int, num_devices: int) -> tuple[int, int, int]:
    """(*) over `nodes`, of which `s.adjacent` says which exclude each other: device-microseconds, K and A."""
    _, clique = heaviest_clique(s.adjacent, us, nodes, s.stack)
    return best_split(s.adjacent, us, area, clique, nodes, num_devices)


@inner
def best_split(
    adjacent: Ints, us: Ints, area: Ints, clique: int, universe: int, num_devices: int
) -> tuple[int, int, int]:
    """The best of (*) that the clique gives: K of it, and as A the rest of it with what only the rest does not exclude.

    Returns device-microseconds, K and A.
    """
    best, best_k, best_a = sum_over(us, clique) * num_devices, clique, 0
    whole = sum_over(area, universe)
    if whole > best:
        best, best_k, best_a = whole, 0, universe
    others = universe & ~clique
    while others:
        beside = clique & ~adjacent[lowest(others)]  # what may run at the same time as this node
        others &= others - 1
        kept = clique & ~beside
        fitting = beside
        rest = universe & ~clique
        while rest:
            if kept & ~adjacent[lowest(rest)] == 0:
                fitting |= 1 << lowest(rest)
            rest &= rest - 1
        value = sum_over(us, kept) * num_devices + sum_over(area, fitting)
        if value > best:
            best, best_k, best_a = value, kept, fitting
    return best, best_k, best_a


@inner
def rounded_up(value: int, divisor: int) -> int:
    """`value / divisor`, not below it."""
    return (value + divisor - 1) // divisor
