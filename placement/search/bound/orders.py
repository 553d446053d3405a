"""A lower bound on an iteration from the orders of train_steps and other calls on common devices, compiled.

Between two runs of an anchor lie all nodes of its cycle, each once, so the iteration takes at least (*) of
`exclusive_work` over them. A train_step and a call that exclude each other, and that no dependency orders, have two
possible orders. In either order more nodes wait for each other, so that (*) is larger; the lesser value counts. Another
iteration may have the other order, but every iteration takes at least the lesser value. If there are several pairs,
each order of the first pair has two orders of the next, until its bound is above another order's.

A call other than a train_step may run in parts. Then either the train_step precedes the whole call, or it follows
everything that the call waits for.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.exclusion import exclude_all
from prefect_rlhf.placement.search.bound.exclusive_work import heaviest_work, rounded_up
from prefect_rlhf.placement.search.bound.scratch import ALL_ITERATIONS, IN_ORDER, MOST_ORDERS, OrderScratch, Scratch
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.tables.dependencies import NEVER
from prefect_rlhf.placement.search.tables.tables import CALL, LINK, Tables
from prefect_rlhf.placement.search.tables.widest_cycle import NONE


@inner
def order_bound(t: Tables, us: Ints, overlap: Ints, s: Scratch, nodes: int, best: int, enough: int) -> int:
    """Return `best`, or the bound from orders in the widest cycle if that is larger; then write the binding term.

    `nodes` take time, and `s.conflict` and `s.area` are filled. An order whose bound reaches `enough` is not divided.
    """
    o = s.orders
    if t.cycle.anchor == NONE:
        return best
    begin(t, overlap, s)
    bound_order(t, us, s, nodes, 0, best)
    pending, counted, least = 1, 1, NEVER
    term = kept = fitting = 0
    while pending:
        pending -= 1
        if o.us[pending] >= least:
            continue
        first = second = NONE
        if o.us[pending] < enough and counted + 2 <= MOST_ORDERS:
            first, second = open_pair(t, us, s, o.before[pending])
        if first == NONE:
            least = o.us[pending]
            term, kept, fitting = o.term[pending, 0], o.term[pending, 1], o.term[pending, 2]
            continue
        divide(t, us, s, nodes, pending, first, second)
        pending, counted = pending + 2, counted + 2
    if term == IN_ORDER:
        s.binding[0], s.binding[1], s.binding[2], s.binding[3], s.binding[4] = term, kept, fitting, 0, 0
    return least


@inner
def begin(t: Tables, overlap: Ints, s: Scratch) -> None:
    """Write the nodes that precede each node in the cycle in every order of calls, by dependencies and visits."""
    before = s.orders.before[0]
    s.orders.term[0, 0] = ALL_ITERATIONS  # or another term, as long as no order has a larger bound
    for node in range(t.num_nodes):
        before[node] = t.cycle.before[node]
    for second in range(t.num_calls):
        others = t.cycle.visits_before[second]
        while others:
            first = lowest(others)
            others &= others - 1
            own, its = 1 << t.node_of[first], 1 << t.node_of[second]
            if overlap[first] & s.crowd.apart[first] & 1 << second:
                precede(before, t.visit_nodes[first], t.visit_nodes[second])
            if s.crowd.beside[first] >> second & 1:
                precede(before, own, t.visit_nodes[second])
            if s.crowd.beside[second] >> first & 1:
                precede(before, t.visit_nodes[first], its)


@inner
def precede(before: Ints, first: int, second: int) -> None:
    """Let each of some nodes, and all that precedes them, precede each of others, and all that follows these."""
    earlier = first
    while first:
        earlier |= before[lowest(first)]
        first &= first - 1
    for node in range(len(before)):
        if (before[node] | 1 << node) & second:
            before[node] |= earlier


@inner
def bound_order(t: Tables, us: Ints, s: Scratch, nodes: int, place: int, least: int) -> None:
    """Write (*) over the cycle, given the nodes before each node in this order, or `least` if that is more."""
    o, before = s.orders, s.orders.before[place]
    members = in_cycle(t, before)
    for node in range(t.num_nodes):
        s.adjacent[node] = s.conflict[node]
    for node in range(t.num_nodes):
        exclude_all(1 << node, before[node], s.adjacent)
    work, kept, fitting = heaviest_work(us, s.area, s, members & nodes, t.num_devices)
    value = rounded_up(work, t.num_devices)
    o.us[place] = max(value, least)
    if value > least:
        o.term[place, 0], o.term[place, 1], o.term[place, 2] = IN_ORDER, kept, fitting


@inner
def in_cycle(t: Tables, before: Ints) -> int:
    """Return the nodes that run between two runs of the anchor: the members, and the link nodes between them."""
    members = t.cycle.members
    begun = members & ~(1 << t.cycle.anchor)
    for node in range(t.num_nodes):
        is_before_end = before[t.cycle.anchor] >> node & 1
        if t.node_kind[node] == LINK and is_before_end and before[node] & begun:
            members |= 1 << node
    return members


@inner
def open_pair(t: Tables, us: Ints, s: Scratch, before: Ints) -> tuple[int, int]:
    """Return the longest train_step and call of the cycle that cannot run at once and have no order yet.

    They have one if everything that the call waits for comes before the train_step. Returns NONE if no pair is left.
    """
    most, first, second = 0, NONE, NONE
    trains = t.cycle.train_steps
    while trains:
        node = t.node_of[lowest(trains)]
        trains &= trains - 1
        others = s.conflict[node] & t.cycle.members & ~(before[node] | 1 << node)
        while others:
            other = lowest(others)
            others &= others - 1
            is_open = t.node_kind[other] == CALL and before[other] & (1 << node | ~before[node]) != 0
            if is_open and before[other] >> node & 1 == 0 and us[node] + us[other] > most:
                most, first, second = us[node] + us[other], node, other
    return first, second


@inner
def divide(t: Tables, us: Ints, s: Scratch, nodes: int, place: int, first: int, second: int) -> None:
    """Replace an order by both orders of a train_step and a call; the order with the lesser bound comes last."""
    o = s.orders
    least, other = o.us[place], place + 1
    for node in range(t.num_nodes):
        o.before[other, node] = o.before[place, node]
    for word in range(3):
        o.term[other, word] = o.term[place, word]
    precede(o.before[place], 1 << first, 1 << second)
    is_whole = t.cycle.train_steps >> t.first[second] & 1 != 0
    precede(o.before[other], 1 << second if is_whole else o.before[other, second], 1 << first)
    bound_order(t, us, s, nodes, place, least)
    bound_order(t, us, s, nodes, other, least)
    if o.us[place] < o.us[other]:
        exchange(o, place, other)


@inner
def exchange(o: OrderScratch, place: int, other: int) -> None:
    """Exchange two orders."""
    for node in range(o.before.shape[1]):
        o.before[place, node], o.before[other, node] = o.before[other, node], o.before[place, node]
    for word in range(3):
        o.term[place, word], o.term[other, word] = o.term[other, word], o.term[place, word]
    o.us[place], o.us[other] = o.us[other], o.us[place]
