"""The oracle of orders, in plain Python: whether the nodes of a plan have an order in which they repeat in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from prefect_rlhf.placement.search.problem import Choice, LinkNode, PlannedCall, Problem, ProblemNode
from tests.placement.search import plain

Matrix = NDArray[np.float64]
Numbers = NDArray[np.int64]
FAR = 3  # iterations by which an order puts a node ahead of another that hardly waits for it


@dataclass(frozen=True)
class Jobs:
    """Jobs of an iteration, the waits between them with their lags, and pairs that never run at once."""

    us: list[int]
    waits: set[tuple[int, int, int]]
    apart: set[tuple[int, int]]

    def repeated(self, times: int) -> Jobs:
        """The jobs of so many iterations as one, so that each may have another order."""
        count = len(self.us)
        waits = {
            (source + count * index, target + count * ((index + lag) % times), (index + lag) // times)
            for source, target, lag in self.waits
            for index in range(times)
        }
        numbers = range(times)
        apart = {(a + count * i, b + count * j) for a, b in self.apart for i in numbers for j in numbers}
        return Jobs(self.us * times, waits, apart)


def jobs_of(problem: Problem, plan: Mapping[str, Choice], in_parts: bool = False) -> Jobs:
    """The jobs of a plan. With `in_parts`, each longer call that is no train_step is two jobs in turn."""
    ends: dict[str, tuple[int, int]] = {}
    us: list[int] = []
    waits: set[tuple[int, int, int]] = set()
    for node in problem.nodes:
        first, whole = len(us), plain.duration(problem, plan, node)
        if in_parts and whole > 1 and isinstance(node, PlannedCall) and node.kind != "train_step":
            us += [whole // 2, whole - whole // 2]
            waits.add((first, first + 1, 0))
        else:
            us.append(whole)
        ends[node.name] = first, len(us) - 1
        waits.add((len(us) - 1, first, 1))
    absent = {node.name for node in problem.nodes if plain.is_absent(problem, plan, node)}
    for edge in problem.edges:
        if edge.without is None or edge.without in absent:
            waits.add((ends[edge.source][1], ends[edge.target][0], edge.lag))
    apart = set()
    for one, other in combinations(problem.nodes, 2):
        used, its = (plain.occupied(problem, plan, node) | plain.visits(problem, plan, node) for node in (one, other))
        if {one.name, other.name} & absent or not used & its:
            continue
        own, theirs = (range(ends[node.name][0], ends[node.name][1] + 1) for node in (one, other))
        apart |= set(product(own, theirs))
    for first, second, lag in _visits_in_order(problem, plan):
        waits.add((ends[first][1], ends[second][0], lag))
    return Jobs(us, waits, apart)


def _visits_in_order(problem: Problem, plan: Mapping[str, Choice]) -> Iterator[tuple[str, str, int]]:
    """Pairs of nodes of visits that must not run at once, in the order of their calls."""

    def call_of(node: ProblemNode) -> str | None:
        return node.name if isinstance(node, PlannedCall) else node.call if isinstance(node, LinkNode) else None

    for one, other in product(problem.nodes, repeat=2):
        pair = call_of(one), call_of(other)
        apart = frozenset((one.name, other.name)) in plain.visits(problem, plan, one)
        if apart and pair in problem.visits_after:
            yield one.name, other.name, problem.visits_after[pair]


def can_repeat(jobs: Jobs, period: int, times: int = 1, tries: int = 1000) -> bool:
    """Whether some order lets the jobs of an iteration begin `period` after those of the iteration before.

    With `times` iterations in turn, the orders of these may differ. It gives up after so many `tries`.
    """
    if _load(jobs) > period:
        return False
    jobs = jobs.repeated(times)
    after = np.full((len(jobs.us),) * 2, -np.inf)
    np.fill_diagonal(after, 0.0)
    for source, target, lag in jobs.waits:
        if not _wait(after, source, target, jobs.us[source] - period * times * lag):
            return False
    pairs = np.array(sorted({(min(pair), max(pair)) for pair in jobs.apart}), dtype=int).reshape(-1, 2)
    return _has_order(after, np.array(jobs.us), period * times, *pairs.T, iter(range(tries)))


def _load(jobs: Jobs) -> int:
    """The time of some jobs that exclude each other, the longest first."""
    chosen: list[int] = []
    for job in sorted(range(len(jobs.us)), key=lambda job: -jobs.us[job]):
        if all((job, other) in jobs.apart or (other, job) in jobs.apart for other in chosen):
            chosen.append(job)
    return sum(jobs.us[job] for job in chosen)


def _wait(after: Matrix, source: int, target: int, us: float) -> bool:
    """Let a job begin `us` after another begins, at the earliest. Returns whether it can."""
    if after[source, target] < us:
        np.maximum(after, after[:, [source]] + us + after[[target]], out=after)
    return bool((np.diagonal(after) <= 0).all())


def _has_order(after: Matrix, us: Numbers, period: int, first: Numbers, second: Numbers, tries: Iterator[int]) -> bool:
    """Whether the jobs have an order in which no two that exclude each other run at once.

    `after` says by how long each job begins after each other at least. If the second of a pair is some iterations ahead
    when it waits for the first, the first waits for the second of the iteration behind.
    """
    while True:
        least = np.ceil(np.maximum((after[second, first] + us[first]) / period, -FAR))
        most = np.floor(np.minimum(1 - (after[first, second] + us[second]) / period, FAR))
        if (least > most).any():
            return False
        ahead, behind = us[first] - period * least, us[second] - period * (1 - least)
        missing = (least == most) & ((after[first, second] < ahead) | (after[second, first] < behind))
        if not missing.any():
            break
        for pair in np.flatnonzero(missing):
            one, other = first[pair], second[pair]
            if not (_wait(after, one, other, ahead[pair]) and _wait(after, other, one, behind[pair])):
                return False
    if (least == most).all():
        return True
    pair = min(np.flatnonzero(least < most), key=lambda index: most[index] - least[index])
    for lag in np.arange(least[pair], most[pair] + 1):
        if next(tries, None) is None:
            return False
        further, one, other = after.copy(), first[pair], second[pair]
        ahead = _wait(further, one, other, us[one] - period * lag)
        fits = ahead and _wait(further, other, one, us[other] - period * (1 - lag))
        if fits and _has_order(further, us, period, first, second, tries):
            return True
    return False


def least_period(jobs: Jobs, times: int = 1) -> int:
    """The least whole period of any order that repeats after so many iterations."""
    low, high = 0, sum(jobs.us)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if can_repeat(jobs, middle, times) else (middle, high)
    return high
