"""The schedule of a run's device locks, and the period of its iterations, compiled: `placement.schedule` in integers.

Of the nodes that wait for devices the earliest in the graph goes first (the earlier iteration, then the earlier node).
A later node may pass it only if they share no resource. An iteration begins when all iterations up to the
`in_flight`-th before it are over. Zero-length nodes are contracted.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.bound.exclusion import visitors
from prefect_rlhf.placement.search.compiled import Ints, inner, lowest
from prefect_rlhf.placement.search.partial.list_schedule import Agenda, in_reach
from prefect_rlhf.placement.search.tables.tables import CALL, Tables

STUCK = 1 << 50  # microseconds: the period of a plan whose nodes wait for each other


@inner
def period_in_graph_order(t: Tables, us: Ints, overlap: Ints, a: Agenda) -> int:
    """Microseconds between the ends of consecutive iterations, once it repeats. Writes the start of each run.

    `a.crowded` is filled.
    """
    prepare(t, us, overlap, a)
    num_iterations = t.iterations - max(1, min(t.in_flight - 1, (t.iterations - 1) // 4))  # in the others it drains
    now = over = num_ready = num_running = 0
    num_ended = 0
    for run in range(len(a.missing)):
        if a.missing[run] == 0:
            num_ready, num_ended = arrive(t, us, a, run, num_ready, num_ended)
    while True:
        over, num_ready = settle(t, us, a, now, over, num_ready, num_ended)
        if over >= num_iterations:
            return steady_us(a.over_at, num_iterations)
        num_ready, num_running = begin_those_that_may(t, a, now, num_ready, num_running)
        if num_running == 0:
            return STUCK
        now = first_end(us, a, num_running, t.num_nodes)
        num_running, num_ended = end_those_that_do(us, a, now, num_running, t.num_nodes)


@inner
def prepare(t: Tables, us: Ints, overlap: Ints, a: Agenda) -> None:
    """Write the number of events that each run awaits, and the resources that each node uses and blocks."""
    for node in range(t.num_nodes):
        a.own[node] = t.resources[node]
        a.reach[node] = in_reach(t, t.resources[node], overlap)
    fill_visits(t, us, overlap, a)
    for iteration in range(t.iterations):
        a.left[iteration] = t.num_nodes
        for node in range(t.num_nodes):
            run = iteration * t.num_nodes + node
            a.missing[run] = t.num_dependencies[run] + (1 if iteration >= t.in_flight else 0)
    for edge in range(len(t.without)):
        if us[t.without[edge, 3]] == 0:
            for iteration in range(max(0, t.without[edge, 2]), min(t.iterations, t.iterations + t.without[edge, 2])):
                a.missing[iteration * t.num_nodes + t.without[edge, 1]] += 1


@inner
def fill_visits(t: Tables, us: Ints, overlap: Ints, a: Agenda) -> None:
    """Add what keeps visits apart from each other and from calls that leave no room: bit 2 C + c is call c's."""
    visiting = visitors(t, us)
    remaining = visiting
    while remaining:
        call = lowest(remaining)
        remaining &= remaining - 1
        members = t.visit_nodes[call]
        while members:
            a.own[lowest(members)] |= 1 << 2 * t.num_calls + call
            a.reach[lowest(members)] |= (overlap[call] & t.strangers[call] & visiting) << 2 * t.num_calls
            members &= members - 1
    for call in range(t.num_calls):
        if a.crowded[call]:
            a.own[t.node_of[call]] |= 1 << 2 * t.num_calls + call
            a.reach[t.node_of[call]] |= a.crowded[call] << 2 * t.num_calls
        others = a.crowded[call]
        while others:
            members = t.visit_nodes[lowest(others)]
            others &= others - 1
            while members:
                a.reach[lowest(members)] |= 1 << 2 * t.num_calls + call
                members &= members - 1


@inner
def arrive(t: Tables, us: Ints, a: Agenda, run: int, num_ready: int, num_ended: int) -> tuple[int, int]:
    """Let a run without remaining dependencies wait for its devices; a run that takes no time ends at once."""
    node = run % t.num_nodes
    if us[node] == 0 and t.node_kind[node] != CALL:
        a.ended[num_ended] = run
        return num_ready, num_ended + 1
    at = num_ready
    while at > 0 and a.ready[at - 1] > run:
        a.ready[at] = a.ready[at - 1]
        at -= 1
    a.ready[at] = run
    return num_ready + 1, num_ended


@inner
def settle(t: Tables, us: Ints, a: Agenda, now: int, over: int, num_ready: int, num_ended: int) -> tuple[int, int]:
    """Let all arrive that waited for runs that have ended. Returns the numbers of iterations over and runs ready."""
    while num_ended or (over < t.iterations and a.left[over] == 0):
        if num_ended == 0:
            a.over_at[over] = now
            begun = over + t.in_flight
            over += 1
            if begun < t.iterations:
                for run in range(begun * t.num_nodes, (begun + 1) * t.num_nodes):
                    num_ready, num_ended = awaited_ended(t, us, a, run, num_ready, num_ended)
            continue
        num_ended -= 1
        run = a.ended[num_ended]
        node, iteration = run % t.num_nodes, run // t.num_nodes
        a.left[iteration] -= 1
        for edge in range(t.edge_start[node], t.edge_start[node + 1]):
            if iteration + t.edge_lag[edge] < t.iterations:
                follower = run - node + t.edge_lag[edge] * t.num_nodes + t.edge_target[edge]
                num_ready, num_ended = awaited_ended(t, us, a, follower, num_ready, num_ended)
        for edge in range(len(t.without)):
            later = iteration + t.without[edge, 2]
            if t.without[edge, 0] == node and us[t.without[edge, 3]] == 0 and 0 <= later < t.iterations:
                follower = later * t.num_nodes + t.without[edge, 1]
                num_ready, num_ended = awaited_ended(t, us, a, follower, num_ready, num_ended)
    return over, num_ready


@inner
def awaited_ended(t: Tables, us: Ints, a: Agenda, run: int, num_ready: int, num_ended: int) -> tuple[int, int]:
    """Decrease the number of events that a run awaits."""
    a.missing[run] -= 1
    return arrive(t, us, a, run, num_ready, num_ended) if a.missing[run] == 0 else (num_ready, num_ended)


@inner
def begin_those_that_may(t: Tables, a: Agenda, now: int, num_ready: int, num_running: int) -> tuple[int, int]:
    """Begin the ready runs whose resources are free and not claimed by an earlier waiting run."""
    busy = kept = 0
    for index in range(num_running):
        busy |= a.reach[a.running[index] % t.num_nodes]
    for index in range(num_ready):
        run = a.ready[index]
        node = run % t.num_nodes
        if a.own[node] & busy == 0:
            a.starts[run] = now
            a.running[num_running] = run
            num_running += 1
        else:
            a.ready[kept] = run
            kept += 1
        busy |= a.reach[node]
    return kept, num_running


@inner
def first_end(us: Ints, a: Agenda, num_running: int, num_nodes: int) -> int:
    """When the next of the running ends."""
    first = a.starts[a.running[0]] + us[a.running[0] % num_nodes]
    for index in range(1, num_running):
        first = min(first, a.starts[a.running[index]] + us[a.running[index] % num_nodes])
    return first


@inner
def end_those_that_do(us: Ints, a: Agenda, now: int, num_running: int, num_nodes: int) -> tuple[int, int]:
    """Move the runs that end now to `ended`."""
    kept = num_ended = 0
    for index in range(num_running):
        run = a.running[index]
        if a.starts[run] + us[run % num_nodes] <= now:
            a.ended[num_ended] = run
            num_ended += 1
        else:
            a.running[kept] = run
            kept += 1
    return kept, num_ended


@inner
def steady_us(over_at: Ints, num_iterations: int) -> int:
    """Microseconds per iteration as `schedule.steady_seconds` counts them, the first iteration left out; rounded up."""
    last, num_gaps = num_iterations - 1, num_iterations - 2
    half = num_gaps // 2
    length = num_gaps - half
    for period in range(half, 0, -1):
        alike = True
        for index in range(half, num_gaps):
            one = over_at[index + 2] - over_at[index + 1]
            alike = alike and one == over_at[index + 2 - period] - over_at[index + 1 - period]
        if alike:
            length = period
    return (over_at[last] - over_at[last - length] + length - 1) // length
