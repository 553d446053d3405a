"""From a question to the best plan that a search finds, a bound on every plan, and the presets' times.

Several searches look for plans that fit (see `attempts`). Their plans form a pool, which `PASSES` improve one after
another: the fastest plans are improved on their augmented graphs, then the simplest of the nearly fastest is chosen.
The bound holds for the whole space.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.attempts import (
    ATTEMPTS,
    NEARLY,
    Attempt,
    SearchRequest,
    highest_bound,
    make_attempts,
    presets_of,
    prove_bound,
)
from prefect_rlhf.placement.planner.passes.local_search import (
    improve_fastest,
    improve_with_rows_first,
    is_small_enough_to_begin_again,
)
from prefect_rlhf.placement.planner.passes.pool import Pass, Pool, Refinement
from prefect_rlhf.placement.planner.passes.refinements import (
    with_fewest_cuts,
    with_least_recomputation,
    with_streamed_parts,
)
from prefect_rlhf.placement.planner.passes.steady import choose_simplest, may_be_unsteady, search_steady
from prefect_rlhf.placement.planner.planned import Planned, differently_placed
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.refusal import no_plan_fits
from prefect_rlhf.placement.planner.solution import is_legal, keeping_words, made_to_fit
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.planner.space.restrictions import pinned
from prefect_rlhf.placement.planner.time_sharing import keep_resident_where_free
from prefect_rlhf.placement.plans.plan_file import name_in_lease
from prefect_rlhf.placement.plans.stated_words import NO_WORDS, Words, names_of, stated_mesh
from prefect_rlhf.placement.search.budget import Budget, Meter
from prefect_rlhf.placement.search.driver import Progress, warm_up
from prefect_rlhf.placement.search.method import Method

PROOF_EVALUATIONS = 10.0  # times the evaluations, for a proof: bounds alone take half a microsecond each
PROOF_SECONDS = 0.1  # of the seconds, for a proof, and for all proofs about plans with streamed parts
IMPROVING_SHARE = 0.9  # of the budget, at least, to improve them; they also get the unused time of the searches


@dataclass(frozen=True, slots=True)
class Parts:
    """The planner's parts by name: searches for plans, passes that improve a pool of plans, refinements of single
    plans.
    """

    attempts: tuple[Attempt, ...]
    passes: tuple[Pass, ...]
    refinements: tuple[Refinement, ...]

    @property
    def names(self) -> tuple[str, ...]:
        parts: tuple[Attempt | Pass | Refinement, ...] = (*self.attempts, *self.passes, *self.refinements)
        return tuple(each.name for each in parts)

    def without(self, name: str) -> "Parts":
        """Return all parts but one."""
        return Parts(
            tuple(each for each in self.attempts if each.name != name),
            tuple(each for each in self.passes if each.name != name),
            tuple(each for each in self.refinements if each.name != name),
        )


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from a search for cyclic garbage: a planner has millions of live values, and hardly any cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_without_collections()
def plan_graph(
    question: Question,
    budget_seconds: float | None = None,
    method: Method = "exact",
    progress: Callable[[Progress], None] | None = None,
    pins: Mapping[str, DeviceMesh] | None = None,
    evaluations: float | None = None,
    start: ExecutionPlan | None = None,
    proves: bool = True,
    words: Words = NO_WORDS,
    parts: Parts | None = None,
    simplicity: float = NEARLY,
) -> Planned:
    """Return the best plan for a question that a search finds within a budget (`Budget.of`).

    By default, and with `evaluations`, the answer depends on the question alone. With `budget_seconds` of processor
    time it also depends on the machine. `pins` are the meshes that some calls must use. `start` is a legal plan: if it
    fits and respects the pins, the answer is never slower. The answer and the presets have the stated `words`. Unless
    it `proves`, the bound is the search's, for plans without streamed parts, and takes no extra time. `parts` are the
    planner's parts to use, by default `ALL_PARTS`. A simpler plan is preferred to the fastest if it takes longer by at
    most the share `simplicity`. Raises InvalidInput for a budget that is not positive, for a mesh outside the cluster,
    and if no plan fits.
    """
    whole = Budget.of(evaluations, budget_seconds)
    proof = Budget(whole.evaluations * PROOF_EVALUATIONS, whole.seconds * PROOF_SECONDS)
    budget = replace(whole, seconds=whole.seconds * (1 - 2 * PROOF_SECONDS)) if proves else whole
    question.site.cluster.check_mesh(question.site.mesh)
    for each in dict.fromkeys(("exact", method)):
        warm_up(each)  # before the budget begins: the answer is the same on a machine that must compile first
    parts = parts or ALL_PARTS
    pins = _with_stated_meshes(question, pins or {}, words)
    space_of = partial(_space, pins=pins, start=start)
    space = space_of(question)
    known = [] if start is None else _known(question, start, pins)
    meshes = {call: {"mesh": name_in_lease(mesh, question.site.cluster)} for call, mesh in pins.items()}
    both = {call: {**words.get(call, {}), **meshes.get(call, {})} for call in (*words, *meshes)}
    request = SearchRequest(question, space, budget, method, progress, space_of, both, simplicity)
    if question.graph.staleness > 0:
        request = replace(request, budget=replace(budget, seconds=budget.seconds / 2))
        known += _without_staleness(replace(request, progress=None), parts)
    return _planned(request, parts, known, proof if proves else None)


def _with_stated_meshes(question: Question, pins: Mapping[str, DeviceMesh], words: Words) -> dict[str, DeviceMesh]:
    """The pins and the meshes that the words state for calls with a model.

    Raises InvalidInput, which names both, for a call with two meshes.
    """
    found = dict(pins)
    for call in question.graph:
        mesh = stated_mesh(words, call.name, question.site.cluster)
        if mesh is None or call.role is None:
            continue
        if found.setdefault(call.name, mesh) != mesh:
            right = f"{mesh.name}, as placement.{call.name}.mesh"
            raise InvalidInput(f"pins.{call.name}", found[call.name].name, right)
    return found


def _planned(request: SearchRequest, parts: Parts, known: Sequence[ExecutionPlan], proof: Budget | None) -> Planned:
    """The answer of a search, never slower than a plan of `known`, which fit; with a `proof` of this budget."""
    meter = Meter(request.budget)
    findings = make_attempts(request, parts.attempts)
    meter.spend(request.budget.evaluations)
    left = meter.left.at_least(request.budget.times(IMPROVING_SHARE))
    pool = Pool.of(request, findings, known, parts.refinements, left)
    if pool is None:
        raise no_plan_fits(request.question, request.space, request.budget.times(1 / 4))
    for each in parts.passes:
        if each.applies(pool):
            pool = each.improve(pool)
    return _answer(pool, proof)


def _answer(pool: Pool, proof: Budget | None) -> Planned:
    """The answer of a pool, with a bound."""
    question, plan = pool.question, pool.answer
    estimate = question.estimate(plan)
    fastest_seconds = min(question.seconds(pool.fastest), estimate.seconds)
    proven = prove_bound(pool.request, proof, pool.findings, fastest_seconds)
    compared = [(plan, estimate.seconds), (pool.fastest, question.seconds(pool.fastest)), *pool.timed]
    return Planned(
        plan,
        estimate,
        question.certificate(plan),
        proven.lower_bound_seconds,
        proven.binding,
        proven.provable_seconds,
        highest_bound(pool.findings),
        presets_of(pool.findings),
        pool.request.space,
        fastest_seconds,
        tuple(differently_placed(compared)),
    )


def _without_staleness(request: SearchRequest, parts: Parts) -> list[ExecutionPlan]:
    """The answer to the question without staleness, if it fits: to wait for fresh weights never makes a plan useless.

    It has the whole budget of the request, so with staleness no answer is slower than without.
    """
    question, space = request.question, request.space
    fresh = replace(question, graph=replace(question.graph, staleness=0))
    context = replace(space.context, question=fresh, graph=replace(space.context.graph, staleness=0))
    try:
        found = _planned(replace(request, question=fresh, space=PlanSpace(context, space.candidates)), parts, (), None)
    except InvalidInput:  # nothing fits
        return []
    return _known(question, found.plan, {})


def _known(question: Question, plan: ExecutionPlan, pins: Mapping[str, DeviceMesh]) -> list[ExecutionPlan]:
    """The plan, made to fit if it can be and if it is legal and keeps to the pins."""
    if any(plan[call].mesh != mesh for call, mesh in pins.items()) or not is_legal(question, plan):
        return []
    fitted = made_to_fit(question, replace(plan, name="auto"))
    return [] if fitted is None else [fitted]


def _space(question: Question, pins: Mapping[str, DeviceMesh], start: ExecutionPlan | None) -> PlanSpace:
    """The plans that keep the pinned calls on their meshes, also on meshes that a large lease's space leaves out.

    It has the meshes of `start`, too.
    """
    site = question.site
    on_lease = {call: mesh for call, mesh in pins.items() if site.mesh.contains(mesh)}
    also = [site.cluster.check_mesh(mesh, f"pins.{call}") for call, mesh in on_lease.items()]
    placed = [] if start is None else [placement for _, placement in start.placements]
    also += [placement.mesh for placement in placed if TRAITS[placement.engine].holds_weights]
    return pinned(PlanSpace.of(question, also), pins)


def _refine_fastest(pool: Pool) -> Pool:
    return replace(pool, fastest=pool.refined(pool.fastest))


def _stream_parts(pool: Pool) -> Pool:
    return replace(pool, chosen=with_streamed_parts(pool.question, pool.answer))


def _states_words(pool: Pool) -> bool:
    """Whether a plan must have words that no search was restricted to."""
    return any(word != "mesh" for _, word in names_of(pool.request.words))


def _keep_words(pool: Pool) -> Pool:
    presets = [preset.plan for preset in presets_of(pool.findings) if preset.plan]
    plan = keeping_words(pool.question, pool.answer, presets, pool.request.words)
    return replace(pool, fastest=plan, chosen=plan)


def _place_computations(question: Question, plan: ExecutionPlan) -> ExecutionPlan:
    """The plan with its computations on the first device of the mesh that makes the iteration shortest."""
    timed = []
    for device in dict.fromkeys(placement.mesh.devices()[0] for _, placement in plan.placements):
        mesh = DeviceMesh(device.node, 1, device.index, 1)
        moved = (
            (name, old if TRAITS[old.engine].holds_weights else replace(old, mesh=mesh))
            for name, old in plan.placements
        )
        changed = replace(plan, placements=tuple(moved))
        timed.append((changed, question.seconds(changed)))
    return min(timed, key=lambda pair: pair[1])[0]


REFINEMENTS = (
    Refinement("places of computations", lambda question, plan, space: _place_computations(question, plan)),
    Refinement("resident copies", lambda question, plan, space: keep_resident_where_free(question, plan)),
    Refinement(
        "least recomputation", lambda question, plan, space: with_least_recomputation(question, plan, space.context)
    ),
    Refinement("fewest cuts", lambda question, plan, space: with_fewest_cuts(question, plan, space.context)),
)
PASSES = (
    Pass("local search", improve_fastest),
    Pass("local search with rows first", improve_with_rows_first, is_small_enough_to_begin_again),
    Pass("refinements", _refine_fastest),
    Pass("steady plans", search_steady, may_be_unsteady),
    Pass("simplest plan", choose_simplest),
    Pass("streamed parts", _stream_parts),
    Pass("stated words", _keep_words, _states_words),
)
ALL_PARTS = Parts(ATTEMPTS, PASSES, REFINEMENTS)
