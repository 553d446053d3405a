"""Memory for intermediate results of a bound, allocated once, because allocation takes as long as the bound itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.bound.cliques import STACK
from prefect_rlhf.placement.search.compiled import Ints
from prefect_rlhf.placement.search.record import Record
from prefect_rlhf.placement.search.tables.tables import Tables

LOOP, ALL_ITERATIONS, CYCLE = -1, 0, 1  # terms of the bound, in `Scratch.binding`
IN_ORDER = -2  # the same: the widest cycle in some order of its calls
MOST_ORDERS = 32  # that a bound counts


@dataclass(frozen=True, slots=True, eq=False)
class Crowd(Record):
    """The visits that find no room beside calls, see `fill_crowd`; arrays are changed in place."""

    apart: Ints  # [C]: for each call that visits the set of calls whose visits exclude its own on common devices
    beside: Ints  # [C]: for each call the set of calls whose visits find no room on its devices while it runs
    late: Ints  # [1]: set of calls whose visits have their devices to themselves, since some call leaves no room
    held: Ints  # [C]: scratch, as below
    stack: Ints  # [STACK], of `heaviest_clique`


def empty_crowd(num_calls: int) -> Crowd:
    """Allocate arrays of the right sizes."""
    apart, beside, held = np.zeros((3, num_calls), dtype=np.int64)
    return Crowd(apart, beside, np.zeros(1, dtype=np.int64), held, np.zeros(STACK, dtype=np.int64))


@dataclass(frozen=True, slots=True, eq=False)
class OrderScratch(Record):
    """Orders of the calls of the widest cycle, see `order_bound`; arrays are changed in place."""

    before: Ints  # [MOST_ORDERS, V]: set of nodes that precede each node
    us: Ints  # [MOST_ORDERS]: bound in microseconds
    term: Ints  # [MOST_ORDERS, 3]: its binding term, as in `Scratch.binding`


@dataclass(frozen=True, slots=True, eq=False)
class Scratch(Record):
    """Arrays are changed in place. `area` and `crowd` are inputs, `binding` is the output."""

    area: Ints  # [V]: device-microseconds of each node, see `fill_areas`
    crowd: Crowd
    orders: OrderScratch
    binding: Ints  # [5]: see `bound_of`
    conflict: Ints  # [V]
    adjacent: Ints  # [V]
    by_resource: Ints  # [2 C]
    stack: Ints  # [STACK], of `heaviest_clique`


def scratch_for(t: Tables) -> Scratch:
    """Allocate arrays of the right sizes."""
    area, conflict, adjacent = np.zeros((3, t.num_nodes), dtype=np.int64)
    return Scratch(
        area=area,
        crowd=empty_crowd(t.num_calls),
        orders=OrderScratch(
            before=np.zeros((MOST_ORDERS, t.num_nodes), dtype=np.int64),
            us=np.zeros(MOST_ORDERS, dtype=np.int64),
            term=np.zeros((MOST_ORDERS, 3), dtype=np.int64),
        ),
        binding=np.zeros(5, dtype=np.int64),
        conflict=conflict,
        adjacent=adjacent,
        by_resource=np.zeros(2 * t.num_calls, dtype=np.int64),
        stack=np.zeros(STACK, dtype=np.int64),
    )
