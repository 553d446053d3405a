"""Plans that differ from a given plan in one call, or in all calls of one or two roles, and local search among them.

The search's own problem ranks them. The estimate knows more: row transfers, and copies that several calls share.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import chain, combinations, islice

from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.question import Question, with_copies_agreed
from prefect_rlhf.placement.planner.solution import made_to_fit
from prefect_rlhf.placement.planner.space.candidates import Candidate
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem, PlanSpace
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.completion import completed
from prefect_rlhf.placement.plans.streaming import in_parts
from prefect_rlhf.placement.search.alternatives import Alternative, alternatives, timed_together, unlike
from prefect_rlhf.placement.search.budget import ESTIMATE, Budget, Meter
from prefect_rlhf.placement.search.driver import MICROSECOND, whole_microseconds
from prefect_rlhf.placement.search.problem import Choice, PlannedCall, Problem
from prefect_rlhf.placement.words.cache import CACHE
from prefect_rlhf.placement.words.micro_batches import MICRO_BATCHES
from prefect_rlhf.placement.words.rows_first import sends_rows
from prefect_rlhf.placement.words.table import WORDS

NEGLIGIBLE = 1e-3  # of an iteration: a difference that no estimate means
WHOLE_CACHE = 1e6  # GiB that stand for a cache of all rows
TRIED = 6  # placements of a call, by the local search
TRIED_TOGETHER = 8  # the same for a role or two roles, with room; and half as many without
PARTITIONS = 3  # of the devices in two meshes, the most even, for two roles
FASTEST = 4  # options on each of these meshes, by the time of the train_step
ROUNDS = 3
MOST_DEVICES = 64  # with more, frozen roles do not move together, and fewer plans are searched and improved


def improve_locally(
    question: Question, plan: ExecutionPlan, space: PlanSpace, meter: Meter | None = None
) -> ExecutionPlan:
    """Move calls as long as the iteration gets shorter and the plan fits, until the meter's budget is spent.

    Each call is examined again after another call moved. If no single call improves the plan, whole roles move. At the
    end needless words are dropped.
    """
    meter, begin = meter or Meter(Budget()), question.seconds(plan)
    for _ in range(ROUNDS):
        before = plan
        for _ in range(ROUNDS):
            improved = _improve_once(question, plan, space, meter)
            if improved == plan:
                break
            plan = improved
        plan = _improve_together(question, plan, space, meter)
        if plan == before:
            break
    return _with_needed_words(question, plan, begin, meter)


def rows_first(question: Question, plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with `rows_first` for all calls."""
    return with_changes(plan, _senders(question.graph), rows_first=True)


def _with_needed_words(question: Question, plan: ExecutionPlan, most_seconds: float, meter: Meter) -> ExecutionPlan:
    """The plan without `rows_first` of calls for which it saves hardly anything, in at most so many seconds."""
    most_seconds = min(most_seconds, question.seconds(plan) * (1 + NEGLIGIBLE))
    for call in _senders(question.graph):
        if plan[call.name].rows_first:
            meter.spend(ESTIMATE)
            without = with_changes(plan, (call,), rows_first=False)
            if question.seconds(without) <= most_seconds and question.fits(without):
                plan = without
    return plan


def _senders(graph: DataflowGraph) -> list[Call]:
    return [call for call in graph if call.kind != "compute" and call.every is None and sends_rows(call, graph)]


def _improve_once(question: Question, plan: ExecutionPlan, space: PlanSpace, meter: Meter) -> ExecutionPlan:
    seconds = question.seconds(plan)
    for call, others in neighbours(plan, space, seconds).items():
        for other in islice((other for other in others if other.has_room), TRIED):
            if meter.left.is_spent:
                return plan
            if other.seconds >= seconds:
                break  # so are the rest, and the estimate counts more
            changed = changed_plan(question, plan, {call: other.placement})
            if changed is None:
                continue
            meter.spend(ESTIMATE)
            changed_seconds = question.seconds(changed)
            if changed_seconds < seconds * (1 - NEGLIGIBLE) and question.fits(changed):
                plan, seconds = changed, changed_seconds
                break
    return plan


def _improve_together(question: Question, plan: ExecutionPlan, space: PlanSpace, meter: Meter) -> ExecutionPlan:
    """The fastest of the plan and its `role_moves`; a faster plan that does not fit is made to fit."""
    seconds = question.seconds(plan)
    for placements in role_moves(plan, space, seconds, question.site.mesh.num_devices <= MOST_DEVICES):
        changed = None if meter.left.is_spent else changed_plan(question, plan, placements)
        if changed is None:
            continue
        meter.spend(ESTIMATE)
        if question.seconds(changed) < seconds * (1 - NEGLIGIBLE):
            fitted = made_to_fit(question, changed)
            if fitted is not None and question.seconds(fitted) < seconds * (1 - NEGLIGIBLE):
                plan, seconds = fitted, question.seconds(fitted)
    return plan


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another placement of a call: the iteration time in seconds, and whether it fits, according to the problem."""

    placement: Placement
    seconds: float
    has_room: bool


def neighbours(plan: ExecutionPlan, space: PlanSpace, most_seconds: float = math.inf) -> dict[str, Iterator[Neighbour]]:
    """Rank the other meshes and strategies of each model call, the fastest first; other calls are unchanged.

    Placements that take longer than `most_seconds` are left out. The problem counts the bytes of the fullest device.
    """
    problem = space.most
    choices = {call.name: _choice(problem, call.name, plan[call.name]) for call in problem.problem.calls}
    ranked = alternatives(problem.problem, choices, whole_microseconds(most_seconds))
    return {name: _others(problem, plan[name], name, options) for name, options in ranked.items()}


def role_moves(
    plan: ExecutionPlan, space: PlanSpace, most_seconds: float, moves_frozen: bool = True
) -> Iterator[dict[str, Placement]]:
    """Yield placements that move all calls on a role's trained copy together, or those of two roles.

    The two roles are both trained or, with `moves_frozen`, both frozen. The moves are the fastest by the problem, below
    `most_seconds`: some that fit, and some that do not, which may fit if copies of weights leave.
    """
    problem, posed = space.most, space.most.problem
    choices = {call.name: _choice(problem, call.name, plan[call.name]) for call in posed.calls}
    trainers = {call.role: call for call in posed.calls if call.kind == "train_step"}
    frozen = {call.role: call for call in reversed(posed.calls) if moves_frozen and call.role not in trainers}
    groups, fixed = ([_on_its_copy(c, problem, plan) for c in calls.values()] for calls in (trainers, frozen))
    options = {name: _by_class(problem.candidates[name]) for group in (*groups, *fixed) for name in group}
    for group in groups:
        others = [choice.mesh for name, choice in choices.items() if name not in group]
        meshes = (unlike(posed, each, choices[group[0]].mesh, others) for each in posed.mesh_classes)
        there = [option for mesh in chain(*meshes) for option in _on_mesh(problem, options, group, mesh)]
        yield from _fastest_together(problem, choices, group, there, most_seconds)
    for one, other in (*combinations(groups, 2), *combinations(fixed, 2)):
        both = [
            (*first, *second)
            for mesh, rest in _partitions(posed)
            for first in _on_mesh(problem, options, one, mesh, FASTEST)
            for second in _on_mesh(problem, options, other, rest, FASTEST)
        ]
        yield from _fastest_together(problem, choices, (*one, *other), both, most_seconds)


def _on_its_copy(first: PlannedCall, problem: PlanProblem, plan: ExecutionPlan) -> tuple[str, ...]:
    """A call, such as a train_step, and the other calls that use its role's weights in its engine."""
    engine = plan[first.name].engine
    others = (call.name for call in problem.problem.calls if call.role == first.role and call != first)
    return first.name, *(name for name in others if plan[name].engine == engine)


_ByClass = Mapping[int, Sequence[tuple[float, int, Candidate]]]
"""The options of a call on meshes of each class, with their seconds and numbers, the fastest first."""


def _by_class(candidates: Sequence[Candidate]) -> _ByClass:
    options: dict[int, list[tuple[float, int, Candidate]]] = defaultdict(list)
    for index, option in enumerate(candidates):
        options[option.mesh_class].append((option.seconds, index, option))
    return {mesh_class: sorted(alike, key=lambda entry: entry[:2]) for mesh_class, alike in options.items()}


def _on_mesh(
    problem: PlanProblem,
    options: Mapping[str, _ByClass],
    group: Sequence[str],
    mesh: int,
    count: int | None = None,
) -> Iterator[tuple[Choice, ...]]:
    """The fastest option of the train_step with each strategy and offload, with the same strategy for its group.

    With `count`, only so many of each offload.
    """
    classes = [index for index, members in enumerate(problem.problem.mesh_classes) if mesh in members]
    fastest: list[dict[tuple[object, ...], int]] = []
    for name in group:
        there = merge(*(options[name].get(index, ()) for index in classes), key=lambda entry: entry[:2])
        of_call: dict[tuple[object, ...], int] = {}
        for _, index, option in there:
            placed = option.placement
            of_call.setdefault((placed.strategy, placed.engine, placed.offload if name == group[0] else None), index)
        fastest.append(of_call)
    counts: Counter[object] = Counter()
    for (strategy, engine, offload), index in fastest[0].items():
        others = [of_call.get((strategy, engine, None)) for of_call in fastest[1:]]
        if counts[offload] != count and None not in others:
            counts[offload] += 1
            yield tuple(Choice(option, mesh) for option in (index, *others) if option is not None)


def _partitions(problem: Problem) -> list[tuple[int, int]]:
    """Pairs of meshes for two roles: both on all devices, one on all and the other on a part, or each on its part."""
    by_ends = {(mesh.start, mesh.stop): index for index, mesh in enumerate(problem.meshes)}
    whole = by_ends.get((0, problem.num_devices))
    ends = sorted((abs(2 * stop - problem.num_devices), stop) for start, stop in by_ends if start == 0)
    parts = [(by_ends[0, stop], by_ends.get((stop, problem.num_devices))) for _, stop in ends]
    halves = [(first, second) for first, second in parts if second is not None][:PARTITIONS]
    pairs = [pair for first, second in halves for pair in ((first, second), (second, first))]
    if whole is None:
        return pairs
    beside = [pair for part in chain(*halves[:1]) for pair in ((whole, part), (part, whole))]
    return [*pairs, *beside, (whole, whole)]


def _fastest_together(
    problem: PlanProblem,
    choices: Mapping[str, Choice],
    calls: Sequence[str],
    changes: Sequence[Sequence[Choice]],
    most_seconds: float,
) -> Iterator[dict[str, Placement]]:
    """The fastest of `changes` of the calls on different meshes and strategies, with room and without."""
    timed = timed_together(problem.problem, choices, calls, changes)
    left = {True: TRIED_TOGETHER, False: TRIED_TOGETHER // 2}
    seen: set[object] = set()
    for (us, has_room), change in sorted(zip(timed, changes, strict=True), key=lambda pair: pair[0][0]):
        placements = problem.placements(dict(zip(calls, change, strict=True)))
        key = has_room, *((placed.mesh, placed.strategy) for placed in placements.values())
        if us * MICROSECOND < most_seconds and left[has_room] and key not in seen:
            seen.add(key)
            left[has_room] -= 1
            yield placements


def changed_plan(
    question: Question, plan: ExecutionPlan, placements_of: Mapping[str, Placement]
) -> ExecutionPlan | None:
    """Return the plan with these calls placed differently; None if that is illegal. Evaluation calls follow their
    siblings.

    If the plan streams parts, all calls that may stream do so, in the same number of parts, so that both plans are
    priced alike.
    """
    graph, mesh = question.graph, question.site.mesh
    placements = {name: replace(old, device_order=()) for name, old in plan.placements}
    computes = [old.mesh.devices()[0] for old in placements.values() if not TRAITS[old.engine].holds_weights]
    chosen = {other.name: placements[other.name] for other in graph if other.kind != "compute" and other.every is None}
    chosen |= {name: replace(new, rows_first=placements[name].rows_first) for name, new in placements_of.items()}
    device = (computes or [next(iter(chosen.values())).mesh.devices()[0]])[0]
    try:
        changed = replace(plan, placements=completed(graph, chosen, mesh, device, plan.cluster.backend))
        streamed = _streamed_like(plan, with_copies_agreed(changed, graph), graph)
        return aligned(check_plan(streamed, graph, mesh), graph)
    except RlhfError:
        return None


def _streamed_like(plan: ExecutionPlan, changed: ExecutionPlan, graph: DataflowGraph) -> ExecutionPlan:
    parts = max(placement.parts for _, placement in plan.placements)
    if parts == 1:
        return changed
    whole = replace(changed, placements=tuple((name, replace(old, parts=1)) for name, old in changed.placements))
    return in_parts(graph, whole, parts)


def _choice(problem: PlanProblem, call: str, placement: Placement) -> Choice:
    """The candidate that the plan took, or the most similar; others differ in cuts, caches, offloads."""
    options, meshes = problem.candidates[call], problem.problem.meshes
    decisions = [word for word in WORDS.values() if word not in (MICRO_BATCHES, CACHE)]
    mesh = next(index for index, interval in enumerate(meshes) if interval.label == placement.mesh.name)

    def unlikeness(option: int) -> tuple[bool, bool, int, float]:
        other = options[option].placement
        cuts = abs(other.micro_batches - placement.micro_batches)
        caches = abs((other.cache_gib or WHOLE_CACHE) - (placement.cache_gib or WHOLE_CACHE))
        words = sum(word.of(other) != word.of(placement) for word in decisions)
        return other.strategy != placement.strategy, other.engine != placement.engine, words, cuts + caches

    classes = {index for index, members in enumerate(problem.problem.mesh_classes) if mesh in members}
    on_mesh = [i for i, option in enumerate(options) if option.mesh_class in classes]
    return Choice(min(on_mesh, key=unlikeness), mesh)


def _others(problem: PlanProblem, kept: Placement, call: str, ranked: Iterable[Alternative]) -> Iterator[Neighbour]:
    """Other meshes and strategies, the fastest first."""
    seen = {(kept.mesh, kept.strategy)}
    for alternative in ranked:
        option, mesh = problem.candidates[call][alternative.choice.option], problem.mesh(alternative.choice.mesh)
        if (mesh, option.placement.strategy) not in seen:
            placement = replace(option.placement, mesh=mesh)
            if alternative.has_room:
                seen.add((placement.mesh, placement.strategy))
            offload = kept.offload if kept.engine == placement.engine else placement.offload
            seconds = alternative.makespan_us * MICROSECOND
            yield Neighbour(replace(placement, offload=offload), seconds, alternative.has_room)
