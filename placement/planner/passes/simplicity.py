"""Chooses the simplest of nearly fastest plans that stay fast if a constant is wrong, because estimates are not exact.

A plan's complexity is the length of its description for a person.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from prefect_rlhf.placement.devices.axes import WITHIN_STEPS
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.memory.certificate import NEARLY_FULL, Certificate
from prefect_rlhf.placement.plan import ExecutionPlan, instances, offloaded_parts
from prefect_rlhf.placement.planner.attempts import NEARLY
from prefect_rlhf.placement.planner.neighbours import changed_plan, neighbours
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.words.table import stated

STEADY = 0.03  # regret of a plan, if a constant is wrong by up to two times, that is as good as none
NEAR_LEAST = 0.01  # more than the least regret: also as good
TRIED = 4  # simpler placements of each call, the fastest ones, in each round
ROUNDS = 3


def complexity(question: Question, plan: ExecutionPlan, certificate: Certificate) -> int:
    """Count the parts of a plan's description.

    Each of these counts 1: a mesh; a strategy on a mesh; a copy of weights that is offloaded and reloaded; a call whose
    tensor-parallel groups, or whose pipelines, cross nodes; a word that `is_complex`, such as recomputed layers; a
    device that is nearly full.
    """
    return _structure(question, plan) + is_nearly_full(certificate, question.site.cluster.kept_share)


def is_nearly_full(certificate: Certificate, headroom: float = 0.0) -> bool:
    """Whether some device has too little left for a longer row or for unmodelled memory, including its headroom."""
    return certificate.used_share(headroom) > NEARLY_FULL


def simplest(
    question: Question,
    space: PlanSpace,
    fastest: ExecutionPlan,
    others: Iterable[tuple[ExecutionPlan, float]],
    at_most: float = math.inf,
    regret: Callable[[ExecutionPlan], float] = lambda _: 0.0,
    rivals: Iterable[ExecutionPlan] = (),
    share: float = NEARLY,
) -> ExecutionPlan:
    """Return the simplest plan that takes at most a `share` longer than `fastest`, and at most `at_most` seconds.

    Its `regret` is at most `STEADY`, or near the smallest of `fastest` and of equally fast `rivals` (some of `others`).
    Of equally simple plans it is the fastest. `others` are plans that fit, with their seconds. Starting from the
    simplest of them, single calls move to the meshes of other calls.
    """
    least = question.seconds(fastest)
    limit = nearly(least, at_most, share)
    within = [(fastest, least), *(pair for pair in others if pair[1] <= limit)]
    compared = (fastest, *(plan for plan in rivals if question.seconds(plan) <= limit))
    most_regret = max(STEADY, min(map(regret, compared)) + NEAR_LEAST)
    ranked = [(complexity(question, plan, question.certificate(plan)), seconds, plan) for plan, seconds in within]
    best = next(entry for entry in sorted(ranked, key=lambda entry: entry[:2]) if regret(entry[2]) <= most_regret)
    for _ in range(ROUNDS):
        simpler = []
        for plan in _with_calls_moved(question, space, best[2], limit):
            if _structure(question, plan) > best[0] or (seconds := question.seconds(plan)) > limit:
                continue
            certificate = question.certificate(plan)
            if certificate.fits:
                simpler.append((complexity(question, plan, certificate), seconds, plan))
        better = sorted((entry for entry in simpler if entry[:2] < best[:2]), key=lambda entry: entry[:2])
        before, best = best, next((entry for entry in better if regret(entry[2]) <= most_regret), best)
        if best[0] == before[0]:
            break
    return best[2]


def nearly(least: float, at_most: float, share: float = NEARLY) -> float:
    """Return how long an answer may take, in seconds, if the fastest plan takes `least` seconds."""
    return max(least, min(least * (1 + share), at_most))


def _structure(question: Question, plan: ExecutionPlan) -> int:
    placed = [placement for _, placement in plan.placements if TRAITS[placement.engine].holds_weights]
    meshes = {placement.mesh for placement in placed}
    strategies = {(placement.mesh, placement.strategy) for placement in placed}
    crossing = sum(
        placement.strategy.degrees[axis] > 1 and placement.strategy.span(axis) > placement.mesh.devices_per_node
        for placement in placed
        for axis in WITHIN_STEPS
    )
    complex_words = sum(word.is_complex for placement in placed for word in stated(placement))
    return len(meshes) + len(strategies) + len(offloaded_parts(question.graph, plan)) + crossing + complex_words


def _with_calls_moved(
    question: Question, space: PlanSpace, plan: ExecutionPlan, most_seconds: float
) -> Iterator[ExecutionPlan]:
    """Yield plans that move a single call to another call's mesh, the fastest few of each call first.

    Those that take more than `most_seconds` by the search's problem are left out: the estimate counts more.
    """
    meshes = {placement.mesh for _, placement in plan.placements if TRAITS[placement.engine].holds_weights}
    users = instances(question.graph, plan)
    for call, ranked in neighbours(plan, space, most_seconds).items():
        there = (other.placement for other in ranked if other.has_room and other.placement.mesh in meshes)
        for placement in islice(there, TRIED):
            changed = changed_plan(question, plan, {call: placement})
            if changed is not None and len(instances(question.graph, changed)) <= len(users):
                yield changed
