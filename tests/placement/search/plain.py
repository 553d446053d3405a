"""The oracle: plans enumerated, scheduled and checked for memory in plain Python, from the problem's value alone."""

import itertools
from collections.abc import Iterator, Mapping
from math import ceil
from random import Random

from prefect_rlhf.placement.schedule.list_schedule import Job, job_spans
from prefect_rlhf.placement.schedule.schedule import steady_seconds
from prefect_rlhf.placement.search.problem import (
    Choice,
    ComputeNode,
    LinkNode,
    PairNode,
    PlannedCall,
    Problem,
    ProblemNode,
)


def every_plan(problem: Problem) -> Iterator[dict[str, Choice]]:
    """All plans, those that do not fit as well."""
    pairs = [
        [Choice(i, mesh) for i, option in enumerate(call.options) for mesh in problem.mesh_classes[option.mesh_class]]
        for call in problem.calls
    ]
    for chosen in itertools.product(*pairs):
        yield {call.name: choice for call, choice in zip(problem.calls, chosen, strict=True)}


def devices(problem: Problem, plan: Mapping[str, Choice], call: str) -> set[int]:
    mesh = problem.meshes[plan[call].mesh]
    return set(range(mesh.start, mesh.stop))


def fits(problem: Problem, plan: Mapping[str, Choice]) -> bool:
    """Device by device: static bytes of all that lies there, one per shared copy, and the largest active bytes.

    And the fullest device of each mesh: what it holds while the call runs, and what lies on all devices of the mesh.
    """
    if any(fullest(problem, plan, call) > max(problem.device_bytes) for call in problem.calls):
        return False
    for device, capacity in enumerate(problem.device_bytes):
        static: dict[object, int] = {}
        active = [0]
        for call in problem.calls:
            if device in devices(problem, plan, call.name):
                option = call.options[plan[call.name].option]
                mesh = problem.meshes[plan[call.name].mesh]
                key = call.name if option.copy is None else (option.copy, mesh.start, mesh.stop)
                static[key] = max(static.get(key, 0), option.static_bytes)
                active.append(option.peak_bytes - option.static_bytes)
        if sum(static.values()) + max(active) > capacity:
            return False
    return True


def fullest(
    problem: Problem, plan: Mapping[str, Choice], running: PlannedCall, coming: PlannedCall | None = None
) -> int:
    """Of calls on all devices of the mesh that share a copy the largest counts; none that shares the running call's.

    A call has all of them wherever the two lie as they are related: meshes that are told to be equal, or of classes of
    which the one lies inside the other where they overlap. What is `coming` is there with all of its bytes.
    """
    own = running.options[plan[running.name].option]
    taken = {own.copy}
    static: dict[object, int] = {}
    if coming is not None:
        its = coming.options[plan[coming.name].option]
        taken.add(its.copy)
        static["coming"] = its.loaded_bytes
    for call in problem.calls:
        option = call.options[plan[call.name].option]
        counts = call not in (running, coming) and (option.copy is None or option.copy not in taken)
        if counts and has_all_devices(problem, plan, call, running):
            key = option.copy or call.name
            static[key] = max(static.get(key, 0), option.static_bytes)
    return max(own.peak_bytes, own.fullest_bytes) + sum(static.values())


def has_all_devices(problem: Problem, plan: Mapping[str, Choice], call: PlannedCall, running: PlannedCall) -> bool:
    """Whether a call has all devices of another, wherever the two lie as they are related."""
    outer, inner = (each.options[plan[each.name].option].mesh_class for each in (call, running))
    here, there = devices(problem, plan, running.name), devices(problem, plan, call.name)
    equal = here == there and equality_matters(problem, running, call)
    return equal or bool(here & there and nested(problem, inner, outer))


def is_crowded(problem: Problem, plan: Mapping[str, Choice], running: PlannedCall, coming: PlannedCall) -> bool:
    """Whether some device has no room for what comes for another call while a call runs.

    It is the fullest device of the running call, if the other has all its devices, or a device that both have.
    """
    own, its = (call.options[plan[call.name].option] for call in (running, coming))
    if not leaves(plan, coming) or may_be_one(own.copy, its.copy):
        return False
    is_there = has_all_devices(problem, plan, coming, running)
    if is_there and fullest(problem, plan, running, coming) > max(problem.device_bytes):
        return True
    most = 0
    for device in devices(problem, plan, running.name) & devices(problem, plan, coming.name):
        static: dict[object, int] = {}
        for call in problem.calls:
            option, mesh = call.options[plan[call.name].option], problem.meshes[plan[call.name].mesh]
            is_other = not may_be_one(option.copy, own.copy) and not may_be_one(option.copy, its.copy)
            if call not in (running, coming) and is_other and device in devices(problem, plan, call.name):
                key = call.name if option.copy is None else (option.copy, mesh.start, mesh.stop)
                static[key] = max(static.get(key, 0), option.static_bytes)
        most = max(most, own.peak_bytes + its.loaded_bytes + sum(static.values()))
    return most > max(problem.device_bytes)


def leaves(plan: Mapping[str, Choice], call: PlannedCall) -> bool:
    """Whether the call's model holds more while it visits its devices than all the time."""
    option = call.options[plan[call.name].option]
    return option.loaded_bytes > option.static_bytes


def may_be_one(copy: str | None, other: str | None) -> bool:
    return copy is not None and copy == other


def is_late(problem: Problem, plan: Mapping[str, Choice], coming: PlannedCall) -> bool:
    """Whether a model comes so late that its devices do nothing else: it finds no room, and no other leaves them."""
    there = devices(problem, plan, coming.name)
    others = [call for call in problem.calls if call != coming]
    come_there = {call.name for call in others if leaves(plan, call) and devices(problem, plan, call.name) & there}

    def between(call: PlannedCall) -> set[str]:
        return come_there & problem.between.get((call.name, coming.name), come_there)

    return any(is_crowded(problem, plan, call, coming) and not between(call) for call in others)


def visitors(problem: Problem, plan: Mapping[str, Choice]) -> set[str]:
    """The calls with a link node that takes time."""
    return {n.call for n in problem.nodes if isinstance(n, LinkNode) and not is_absent(problem, plan, n)}


def equality_matters(problem: Problem, first: PlannedCall, second: PlannedCall) -> bool:
    """Whether equal meshes differ from overlapping ones: for a copy that both may have, or for a move between them."""
    copies = [{option.copy for option in call.options} - {None} for call in (first, second)]
    moves = (node for node in problem.nodes if isinstance(node, PairNode) and node.microseconds.ndim == 3)
    ends = {first.name, second.name}
    return bool(copies[0] & copies[1]) or any(
        {move.first, move.second} == ends and (move.microseconds[1] != move.microseconds[2]).any() for move in moves
    )


def nested(problem: Problem, inner: int, outer: int) -> bool:
    """Whether each mesh of a class lies inside every mesh of the other that it overlaps."""
    spans = [
        [(problem.meshes[m].start, problem.meshes[m].stop) for m in problem.mesh_classes[c]] for c in (inner, outer)
    ]
    pairs = itertools.product(*spans)
    return all(c <= a and b <= d for (a, b), (c, d) in pairs if a < d and c < b)


def legal(problem: Problem, plan: Mapping[str, Choice]) -> bool:
    """Whether each call's mesh is one on which its option can run."""
    options = [(plan[call.name], call.options[plan[call.name].option]) for call in problem.calls]
    return all(choice.mesh in problem.mesh_classes[option.mesh_class] for choice, option in options)


def duration(problem: Problem, plan: Mapping[str, Choice], node: ProblemNode) -> int:
    if isinstance(node, ComputeNode):
        return node.microseconds
    if isinstance(node, PlannedCall):
        return node.options[plan[node.name].option].microseconds
    if isinstance(node, LinkNode):
        return int(node.microseconds[plan[node.call].option])
    table = node.by_option
    if table.ndim == 3:
        first, second = devices(problem, plan, node.first), devices(problem, plan, node.second)
        table = table[2 if first == second else 1 if first & second else 0]
    return int(table[plan[node.first].option, plan[node.second].option])


def occupied(problem: Problem, plan: Mapping[str, Choice], node: ProblemNode) -> set[object]:
    """Devices by number; a host link as ("link", device)."""
    if isinstance(node, ComputeNode):
        return set()
    if isinstance(node, PlannedCall):
        return set(devices(problem, plan, node.name))
    if isinstance(node, LinkNode):
        where = devices(problem, plan, node.call)
        links: set[object] = {("link", device) for device in where}
        coming = next(call for call in problem.calls if call.name == node.call)
        is_visit = node.call in visitors(problem, plan)
        late = where if is_visit and is_late(problem, plan, coming) else set()
        return set(where) if node.occupies == "compute" else links | late
    ends = {"first": [node.first], "second": [node.second], "both": [node.first, node.second]}[node.occupies]
    return set().union(*(devices(problem, plan, end) for end in ends))


def visits(problem: Problem, plan: Mapping[str, Choice], node: ProblemNode) -> set[object]:
    """A thing for each pair of nodes that may not run at once since something comes and goes for the calls of both.

    So it is for calls of different roles or copies, whose models come and go, on meshes that overlap. And for a visit
    and a call of another copy that leaves no room for what comes.
    """
    calls, visiting = {call.name: call for call in problem.calls}, visitors(problem, plan)
    chosen = {name: call.options[plan[name].option] for name, call in calls.items()}
    come_and_go = visiting | {name for name, call in calls.items() if leaves(plan, call)} if visiting else visiting

    def visitor(of: ProblemNode) -> PlannedCall | None:
        return of if isinstance(of, PlannedCall) else calls[of.call] if isinstance(of, LinkNode) else None

    pairs = set()
    for one, other in itertools.permutations(problem.nodes, 2):
        own, its = visitor(one), visitor(other)
        if node not in (one, other) or own is None or its is None or own == its:
            continue
        are_apart = own.role != its.role or not may_be_one(chosen[own.name].copy, chosen[its.name].copy)
        shares = devices(problem, plan, own.name) & devices(problem, plan, its.name)
        if {own.name, its.name} <= come_and_go and are_apart and shares:
            pairs.add(frozenset((one.name, other.name)))
        if isinstance(one, PlannedCall) and its.name in visiting and is_crowded(problem, plan, own, its):
            pairs.add(frozenset((one.name, other.name)))
    return set(pairs)


Run = tuple[int, int]  # an iteration and the number of a node


def waits_of(problem: Problem, plan: Mapping[str, Choice], iterations: int) -> dict[Run, set[Run]]:
    """What each run of a node that takes time waits for: through those that take none."""
    absent = {node.name for node in problem.nodes if is_absent(problem, plan, node)}
    number = {node.name: index for index, node in enumerate(problem.nodes)}
    direct: dict[Run, set[Run]] = {(i, n): set() for i in range(iterations) for n in range(len(number))}
    for edge in problem.edges:
        for iteration in range(iterations):
            later = iteration + edge.lag, number[edge.target]
            if later in direct and (edge.without is None or edge.without in absent):
                direct[later].add((iteration, number[edge.source]))

    def resolved(run: Run) -> set[Run]:
        through = [resolved(other) if problem.nodes[other[1]].name in absent else {other} for other in direct[run]]
        return set().union(*through)

    return {run: resolved(run) for run in direct if problem.nodes[run[1]].name not in absent}


def is_absent(problem: Problem, plan: Mapping[str, Choice], node: ProblemNode) -> bool:
    return duration(problem, plan, node) == 0 and not isinstance(node, PlannedCall)


def period(problem: Problem, plan: Mapping[str, Choice]) -> int:
    """As a run's device locks would have it, by the scheduler of augmented graphs."""
    waits = waits_of(problem, plan, problem.iterations)
    runs = sorted(waits)
    submissions = range(problem.in_flight, problem.iterations)
    position = {run: index for index, run in enumerate(runs)}
    bits: dict[object, int] = {}
    jobs = []
    for iteration, number in runs:
        node = problem.nodes[number]
        used = occupied(problem, plan, node) | visits(problem, plan, node)
        mask = sum(1 << bits.setdefault(one, len(bits)) for one in used)
        after = [position[run] for run in waits[iteration, number]]
        after += [len(runs) + iteration - problem.in_flight] if iteration in submissions else []
        jobs.append(Job(mask, float(duration(problem, plan, node)), tuple(after)))
    for step in submissions:
        over = [position[run] for run in runs if run[0] <= step - problem.in_flight]
        jobs.append(Job(0, 0.0, tuple(over)))
    ends = [0.0] * problem.iterations
    for (iteration, _), span in zip(runs, job_spans(jobs), strict=False):
        ends[iteration] = max(ends[iteration], span.end)
    return ceil(steady_seconds(list(itertools.accumulate(ends, max)), problem.in_flight - 1) - 1e-6)


def makespan_in_random_order(problem: Problem, plan: Mapping[str, Choice], iterations: int, random: Random) -> int:
    """Place one ready run after another, as late ones as come up, on devices that are then free."""
    waits = waits_of(problem, plan, iterations)
    used = [occupied(problem, plan, node) | visits(problem, plan, node) for node in problem.nodes]
    where = {run: used[run[1]] for run in waits}
    rank = [random.random() for _ in problem.nodes]
    patience = random.choice([0.0, 0.5, 3.0, 1000.0])  # iterations that a run may be ahead for its rank
    ended: dict[Run, int] = {}
    free: dict[object, int] = {}
    while len(ended) < len(waits):
        ready = [run for run in waits if run not in ended and waits[run] <= ended.keys()]
        run = min(ready, key=lambda run: run[0] + patience * rank[run[1]] + random.random() * 0.01)
        times = [*(ended[other] for other in waits[run]), *(free.get(one, 0) for one in where[run])]
        ended[run] = max(times, default=0) + duration(problem, plan, problem.nodes[run[1]])
        free |= dict.fromkeys(where[run], ended[run])
    return max(ended.values())


def makespan(problem: Problem, plan: Mapping[str, Choice]) -> int:
    """ReaL's list scheduling on devices: a node is absent when it is a move that takes no time.

    "The last node placed on any overlapping mesh" is about whole meshes: a later node need not share the very devices
    of an earlier one for its call's mesh to be in use.
    """
    nodes = [(node, duration(problem, plan, node), occupied(problem, plan, node)) for node in problem.nodes]
    number = {node.name: index for index, (node, _, _) in enumerate(nodes)}
    runs = [(iteration, index) for iteration in range(problem.iterations) for index in range(len(nodes))]
    waits: dict[tuple[int, int], set[tuple[int, int]]] = {run: set() for run in runs}
    for edge in problem.edges:
        for iteration in range(problem.iterations - edge.lag):
            waits[iteration + edge.lag, number[edge.target]].add((iteration, number[edge.source]))
    ended: dict[tuple[int, int], int] = {}
    last: list[tuple[set[object], int]] = []
    while len(ended) < len(runs):
        ready = [run for run in runs if run not in ended and waits[run] <= ended.keys()]
        at = {run: max((ended[other] for other in waits[run]), default=0) for run in ready}
        absent = [r for r in ready if nodes[r[1]][1] == 0 and not isinstance(nodes[r[1]][0], PlannedCall)]
        run = absent[0] if absent else min(ready, key=lambda run: (at[run], run))
        _, microseconds, where = nodes[run[1]]
        if absent:
            ended[run] = at[run]
            continue
        start = max([at[run], *(end for used, end in last if used & where)])
        ended[run] = start + microseconds
        last.append((where, ended[run]))
    return max(ended.values())
