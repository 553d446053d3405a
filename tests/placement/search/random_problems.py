"""Small random problems of every shape that a problem can have.

Moves, links, computations, lags, shared copies, unequal devices.
"""

from dataclasses import replace
from random import Random

import numpy as np

from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.search.problem import (
    ComputeNode,
    Edge,
    Interval,
    LinkNode,
    Option,
    PairNode,
    PlannedCall,
    Problem,
    ProblemNode,
)
from prefect_rlhf.placement.search.rules.ready_first import ReadyFirst
from prefect_rlhf.placement.search.tables.dependencies import direct_dependencies, least_lags
from prefect_rlhf.placement.search.tables.rule import Rule

LINE = 4
PERIOD_ITERATIONS = 16
MESHES = tuple(Interval(start, start + size, f"{start}+{size}") for size in (1, 2, 4) for start in range(0, LINE, size))


def random_problem(seed: int, rule: type[Rule] = ReadyFirst) -> Problem:
    """The same seed gives the same problem by either rule. But what comes and goes, computations, and edges that hold
    only without a move are a run's alone.
    """
    random = Random(seed)
    uneven = random.random() < 0.3
    classes = _classes(uneven)
    calls = [_call(random, index, len(classes)) for index in range(random.choice([2, 3, 3, 4]))]
    moves = [node for index in range(random.randrange(4)) for node in _move(random, index, calls)]
    nodes = _shuffled_in_order(random, [*calls, *moves])
    capacity = random.choice([90, 120, 200])
    edges, iterations = list(_edges(random, nodes)), random.choice([1, 2, 3, 4])
    problem = Problem(
        name=f"random {seed}",
        device_bytes=(capacity,) * 2 + (capacity - 30 * uneven,) * 2,
        meshes=MESHES,
        mesh_classes=classes,
        nodes=tuple(nodes),
        edges=tuple(edges),
        iterations=iterations,
        between=_between(seed, calls),
    )
    if rule is ReadyFirst:
        return _without_links(problem)
    overwrites = _overwrites(random, problem)
    lasting = replace(problem, edges=(*edges, *overwrites), iterations=PERIOD_ITERATIONS)
    return _with_computations(lasting, Random(seed)) if seed % 2 else lasting


def _between(seed: int, calls: list[PlannedCall]) -> dict[tuple[str, str], frozenset[str]]:
    """For half of the pairs a single call that may visit between the two; not drawn, as `loaded` of `_call`."""
    number = {call.name: index for index, call in enumerate(calls)}
    pairs = [(a, b) for a in number for b in number if a != b and (seed + number[a] + number[b]) % 2]
    return {(a, b): frozenset((calls[(seed + number[a]) % len(calls)].name,)) for a, b in pairs}


def _without_links(problem: Problem) -> Problem:
    links = {node.name for node in problem.nodes if isinstance(node, LinkNode)}
    edges = tuple(edge for edge in problem.edges if links.isdisjoint((edge.source, edge.target)))
    return replace(problem, nodes=tuple(node for node in problem.nodes if node.name not in links), edges=edges)


def _with_computations(problem: Problem, random: Random) -> Problem:
    """The same with a computation or two, each on an edge: after its source, and before its target."""
    nodes, edges = list(problem.nodes), list(problem.edges)
    for index, edge in enumerate(random.sample(edges, min(len(edges), random.choice([1, 2])))):
        if edge.without is None:
            compute = ComputeNode(f"compute{index}", random.randrange(1, 15))
            nodes.insert([node.name for node in nodes].index(edge.source) + 1, compute)
            edges.remove(edge)
            edges += [Edge(edge.source, compute.name), Edge(compute.name, edge.target, edge.lag)]
            edges.append(Edge(compute.name, compute.name, 1))  # of two iterations, as on any device
    return replace(problem, nodes=tuple(nodes), edges=tuple(edges))


def _classes(uneven: bool) -> tuple[tuple[int, ...], ...]:
    """One class per size; on unequal devices one per size and half of the line."""
    keys = [(mesh.num_devices, uneven and mesh.num_devices < LINE and mesh.start >= 2) for mesh in MESHES]
    return tuple(tuple(i for i, key in enumerate(keys) if key == wanted) for wanted in dict.fromkeys(keys))


def _call(random: Random, index: int, num_classes: int) -> PlannedCall:
    shared = random.random() < 0.3
    options = []
    for _ in range(random.choice([1, 2, 3])):
        static = random.choice([0, 0, 20, 40])
        copy = random.choice(["x", "y"]) if shared else None
        cost, peak = random.randrange(1, 30), static + random.randrange(60)
        fullest = random.choice([0, 0, peak + 20])
        loaded = (static + 7 * cost) % 90  # not drawn: the problems' other numbers stay as they are
        options.append(Option(Strategy(), random.randrange(num_classes), cost, static, peak, copy, fullest, loaded))
    return PlannedCall(f"call{index}", f"role{index // 2}", "inference", tuple(options))


def _move(random: Random, index: int, calls: list[PlannedCall]) -> list[ProblemNode]:
    if random.random() < 0.3:
        call = random.choice(calls)
        costs = tuple(random.choice([0, random.randrange(1, 15)]) for _ in call.options)
        return [LinkNode(f"link{index}", call.name, costs)]
    first, second = random.sample(calls, 2)
    layers = (3,) if random.random() < 0.5 else ()
    shape = (*layers, len(first.options), len(second.options))
    costs = np.array([random.choice([0, random.randrange(1, 15)]) for _ in range(int(np.prod(shape)))], dtype=np.int64)
    both = [("both",), ("first", "second")][random.randrange(2)]
    return [
        PairNode(f"move{index}{occupies}", first.name, second.name, occupies, costs.reshape(shape)) for occupies in both
    ]


def _shuffled_in_order(random: Random, nodes: list[ProblemNode]) -> list[ProblemNode]:
    """Calls stay in order, so that numbers of calls and of nodes differ."""
    calls = [node for node in nodes if isinstance(node, PlannedCall)]
    shuffled: list[ProblemNode] = [node for node in nodes if not isinstance(node, PlannedCall)]
    places = sorted(random.randrange(len(shuffled) + 1) for _ in calls)
    for shift, (place, call) in enumerate(zip(places, calls, strict=True)):
        shuffled.insert(place + shift, call)
    return shuffled


def _edges(random: Random, nodes: list[ProblemNode]) -> list[Edge]:
    names = [node.name for node in nodes]
    edges = [Edge(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if random.random() < 0.45]
    for _ in range(random.randrange(4)):
        edges.append(Edge(random.choice(names), random.choice(names), random.choice([1, 1, 1, 2])))
    return edges


def _overwrites(random: Random, problem: Problem) -> list[Edge]:
    """A wait that holds only without a move: of a call for an earlier one of its iteration, the next or the last."""
    position = {node.name: index for index, node in enumerate(problem.nodes)}
    moves = [node.name for node in problem.nodes if not isinstance(node, PlannedCall)]
    first, second = sorted(random.sample(range(len(problem.calls)), 2))
    source, target, lag = problem.calls[first].name, problem.calls[second].name, random.choice([-1, 0, 1])
    in_circle = lag + least_lags(direct_dependencies(problem))[position[target], position[source]] <= 0
    return [Edge(source, target, lag, random.choice(moves))] if moves and not in_circle else []
