"""Room for what a bound needs on its way; allocated once, since that takes as long as the bound itself."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefect_rlhf.placement.search.bound.cliques import STACK
from prefect_rlhf.placement.search.bound.precedence import Order, order_for
from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.tables.tables import Tables

ALL_ITERATIONS, LOOP = 0, 1  # terms of the bound, in `explain`


class Scratch(NamedTuple):
    """Arrays are changed in place."""

    head: Ints  # [V]
    tail: Ints  # [V]
    conflict: Ints  # [V]
    adjacent: Ints  # [V]
    total_us: Ints  # [V]: of several runs
    total_area: Ints  # [V]
    order: Order
    by_resource: Ints  # [2 C]
    stack: Ints  # [STACK], of `heaviest_clique`


def scratch_for(t: Tables) -> Scratch:
    """Empty arrays of the right sizes."""
    head, tail, conflict, adjacent, total_us, total_area = np.zeros((6, t.num_nodes), dtype=np.int64)
    by_resource, stack = np.zeros(2 * t.num_calls, dtype=np.int64), np.zeros(STACK, dtype=np.int64)
    return Scratch(head, tail, conflict, adjacent, total_us, total_area, order_for(t), by_resource, stack)
