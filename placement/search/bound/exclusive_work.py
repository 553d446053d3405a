"""A lower bound on the time that mutually exclusive nodes need, compiled.

A set of nodes that exclude each other pairwise (a clique) runs in sequence. While a clique K runs, no node runs that
all of K excludes. If A is a set of such nodes, the remaining time must have room for A's area: each node's duration
times the devices that it occupies. With D devices,

    seconds >= weight(K) + area(A) / D                                                                    (*)
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.cliques import heaviest_clique, sum_over
from prefect_rlhf.placement.search.bound.scratch import Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest


@inner
def heaviest_work(us: Ints, area: Ints, s: Scratch, nodes: int, num_devices: int) -> tuple[int, int, int]:
    """(*) over `nodes`, if `s.adjacent` are the nodes that exclude each other: device-microseconds, K and A.

    The best value from the heaviest clique: K is a part of it; A is the rest, with all nodes that only the rest does
    not exclude.
    """
    _, clique = heaviest_clique(s.adjacent, us, nodes, s.stack)
    best, best_k, best_a = sum_over(us, clique) * num_devices, clique, 0
    whole = sum_over(area, nodes)
    if whole > best:
        best, best_k, best_a = whole, 0, nodes
    others = nodes & ~clique
    while others:
        beside = clique & ~s.adjacent[lowest(others)]  # may run at the same time as this node
        others &= others - 1
        kept = clique & ~beside
        fitting = beside
        rest = nodes & ~clique
        while rest:
            if kept & ~s.adjacent[lowest(rest)] == 0:
                fitting |= 1 << lowest(rest)
            rest &= rest - 1
        value = sum_over(us, kept) * num_devices + sum_over(area, fitting)
        if value > best:
            best, best_k, best_a = value, kept, fitting
    return best, best_k, best_a


@inner
def rounded_up(value: int, divisor: int) -> int:
    """Divide and round up."""
    return (value + divisor - 1) // divisor
