"""From a question to the best plan that a search finds, a bound on every plan, and the presets' times.

Several searches look for plans that fit (see `attempts`). The fastest plan, improved on its augmented graph, is the
answer; if it is not close to the bound, the fastest few are improved. The bound holds for the whole space.
"""

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.correction import Correction
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.attempts import (
    Finding,
    SearchRequest,
    highest_bound,
    is_close,
    make_attempts,
    prove_bound,
    search_whole_space,
)
from prefect_rlhf.placement.planner.fitted_constants import corrected
from prefect_rlhf.placement.planner.neighbours import MOST_DEVICES, improve_locally, rows_first
from prefect_rlhf.placement.planner.planned import Planned, PresetResult, differently_placed
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.refinements import (
    with_fewest_cuts,
    with_least_recomputation,
    with_streamed_parts,
)
from prefect_rlhf.placement.planner.refusal import no_plan_fits
from prefect_rlhf.placement.planner.simplicity import STEADY, simplest
from prefect_rlhf.placement.planner.solution import is_legal, keeping_words, made_to_fit
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.planner.space.restrictions import pinned
from prefect_rlhf.placement.planner.time_sharing import keep_resident_where_free
from prefect_rlhf.placement.plans.plan_file import name_in_lease
from prefect_rlhf.placement.plans.stated_words import NO_WORDS, Words, names_of, stated_mesh
from prefect_rlhf.placement.schedule.changed_constants import TWICE, changed_seconds
from prefect_rlhf.placement.search.budget import Budget, Meter
from prefect_rlhf.placement.search.driver import Progress, warm_up
from prefect_rlhf.placement.search.method import Method

PROOF_EVALUATIONS = 10.0  # times the evaluations, for a proof: bounds alone take half a microsecond each
PROOF_SECONDS = 0.1  # of the seconds, for a proof, and for all proofs about plans with streamed parts
STARTS = 3  # plans that are improved if no plan is close to the bound
UNDER = Correction(compute=0.85, eager_launch=1.4)
"""The change of constants under which further plans are searched. The plans of other searches lose most by slower
launches and by faster compute (ADR 22)."""
STEADY_SHARE = 0.05  # of the budget, for the search under the change
"""The local searches after it have the same seconds together; each may use all evaluations."""
MOST_DEVICES_AHEAD = 256  # with more, the local search does not begin again with rows that move first
RIVALS = 8  # plans, the fastest, that a plan is compared with under each change
IMPROVING_SHARE = 0.9  # of the budget, at least, to improve them; they also get the unused time of the searches


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
) -> Planned:
    """Return the best plan of a question that a search finds within a budget (`Budget.of`).

    By default, and with `evaluations`, the answer depends on the question alone. With `budget_seconds` of processor
    time it also depends on the machine. `pins` are calls that must be on these meshes. `start` is a legal plan: the
    answer is never slower, if it fits and keeps to the pins. The answer and the presets have the stated `words`.
    Unless it `proves`, the bound is the search's, of plans without streamed parts, and takes no more time. Raises
    InvalidInput for a budget that is not positive, a mesh outside the cluster, and when no plan fits.
    """
    whole = Budget.of(evaluations, budget_seconds)
    proof = Budget(whole.evaluations * PROOF_EVALUATIONS, whole.seconds * PROOF_SECONDS)
    budget = replace(whole, seconds=whole.seconds * (1 - 2 * PROOF_SECONDS)) if proves else whole
    question.site.cluster.check_mesh(question.site.mesh)
    for each in dict.fromkeys(("exact", method)):
        warm_up(each)  # before the budget begins: the answer is the same on a machine that must compile first
    pins = _with_stated_meshes(question, pins or {}, words)
    space_of = partial(_space, pins=pins, start=start)
    space = space_of(question)
    known = [] if start is None else _known(question, start, pins)
    meshes = {call: {"mesh": name_in_lease(mesh, question.site.cluster)} for call, mesh in pins.items()}
    both = {call: {**words.get(call, {}), **meshes.get(call, {})} for call in (*words, *meshes)}
    if question.graph.staleness > 0:
        half = replace(budget, seconds=budget.seconds / 2)
        known += _without_staleness(SearchRequest(question, space, half, method, None, space_of, both))
        budget = half
    request = SearchRequest(question, space, budget, method, progress, space_of, both)
    return _planned(request, known, proof if proves else None)


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


def _planned(request: SearchRequest, known: Sequence[ExecutionPlan], proof: Budget | None = None) -> Planned:
    """The answer of a search, never slower than a plan of `known`, which fit; with a `proof` of this budget."""
    question, space, meter = request.question, request.space, Meter(request.budget)
    findings = make_attempts(request)
    presets = _of_each_preset(findings)
    compared = [(plan, question.seconds(plan)) for plan in known]
    compared += [(preset.plan, preset.estimate.seconds) for preset in presets if preset.plan and preset.estimate]
    compared += [(plan, question.seconds(plan)) for finding in findings for plan in finding.admitted]
    timed = [(plan, question.seconds(plan)) for finding in findings for plan in finding.plans] + compared
    if not timed:
        raise no_plan_fits(question, space, request.budget.times(1 / 4))
    meter.spend(request.budget.evaluations)
    left = meter.left.at_least(request.budget.times(IMPROVING_SHARE))
    if is_close(question, findings):
        starts = _starts(question, timed, 1)
    else:
        turns = [plan for finding in findings if finding.take_turns for plan in finding.plans]
        starts = _starts(question, timed, STARTS, turns)
    best = _improved(question, space, starts, left)
    if ahead := _starts_with_rows_first(question, timed, len(starts)):
        best = min(best, _improved(question, space, ahead, left), key=question.seconds)
    fastest = _finished(question, best, space)
    at_most = min((seconds for _, seconds in compared), default=math.inf)
    steady = _steady(request, fastest, [plan for plan, _ in timed])
    fastest = min([fastest, *steady], key=question.seconds)
    timed += [(each, question.seconds(each)) for each in steady]
    rivals = [fastest, *steady, *differently_placed(timed)[:RIVALS]] if steady else []
    regret = _regret(question, rivals)
    simple = simplest(question, space, fastest, timed, at_most, regret, rivals)
    plan = fastest if simple is fastest else _finished(question, replace(simple, name="auto"), space)
    if regret(plan) > max(STEADY, regret(simple)):
        plan = replace(simple, name="auto")
    plan = with_streamed_parts(question, plan)
    if any(word != "mesh" for _, word in names_of(request.words)):
        plan = keeping_words(question, plan, [preset.plan for preset in presets if preset.plan], request.words)
        fastest = plan
    certificate = question.certificate(plan)
    estimate = question.estimate(plan)
    fastest_seconds = min(question.seconds(fastest), estimate.seconds)
    proven = prove_bound(request, proof, findings, fastest_seconds)
    return Planned(
        plan,
        estimate,
        certificate,
        proven.lower_bound_seconds,
        proven.binding,
        proven.provable_seconds,
        highest_bound(findings),
        presets,
        space,
        fastest_seconds,
        tuple(differently_placed([(plan, estimate.seconds), (fastest, question.seconds(fastest)), *timed])),
    )


def _steady(request: SearchRequest, fastest: ExecutionPlan, known: Iterable[ExecutionPlan]) -> list[ExecutionPlan]:
    """Plans that fit and are fast under the change `UNDER`, or no plan.

    They are the fastest few of a short search that knows the change, of `known` and of `fastest`, improved under the
    change. Nothing is searched if the fastest plan does not depend on it; on many devices, which takes long; with older
    weights, where no plan found by it is steadier and nearly as fast; and on hosts, whose constants are measured.
    """
    question = request.question
    devices = [node.device for node in question.site.sources.nodes]
    is_measured = any(device.measured or device.is_host for device in devices)
    if is_measured or question.graph.staleness > 0 or question.site.mesh.num_devices > MOST_DEVICES:
        return []
    changed = corrected(question, UNDER)
    if changed.seconds(fastest) == question.seconds(fastest):
        return []
    space, budget = request.space_of(changed), request.budget.times(STEADY_SHARE)
    found = search_whole_space(replace(request, question=changed, space=space, budget=budget, progress=None)).plans
    starts = differently_placed((plan, changed.seconds(plan)) for plan in (*known, fastest, *found))[:STARTS]
    improving = Budget(request.budget.evaluations, budget.seconds / STARTS)
    return [_finished(changed, _improved(changed, space, [start], improving), space) for start in starts]


def _regret(question: Question, rivals: Sequence[ExecutionPlan]) -> Callable[[ExecutionPlan], float]:
    """By how much a plan is at worst slower than the fastest rival if a constant takes twice as long, as a share."""
    known: dict[object, tuple[float, ...]] = {}

    def seconds(plan: ExecutionPlan) -> tuple[float, ...]:
        if plan.placements not in known:
            sources = question.site.sources
            known[plan.placements] = changed_seconds(question.graph, plan, question.workload, sources, TWICE.values())
        return known[plan.placements]

    least = [min(each) for each in zip(*map(seconds, rivals), strict=True)]

    def regret(plan: ExecutionPlan) -> float:
        return max(mine / best for mine, best in zip(seconds(plan), least, strict=True)) - 1 if least else 0.0

    return regret


def _without_staleness(request: SearchRequest) -> list[ExecutionPlan]:
    """The answer to the question without staleness, if it fits: to wait for fresh weights never makes a plan useless.

    It has the whole budget of the request, so with staleness no answer is slower than without.
    """
    question, space = request.question, request.space
    fresh = replace(question, graph=replace(question.graph, staleness=0))
    context = replace(space.context, question=fresh, graph=replace(space.context.graph, staleness=0))
    try:
        found = _planned(replace(request, question=fresh, space=PlanSpace(context, space.candidates)), ())
    except InvalidInput:  # nothing fits
        return []
    return _known(question, found.plan, {})


def _known(question: Question, plan: ExecutionPlan, pins: Mapping[str, DeviceMesh]) -> list[ExecutionPlan]:
    """The plan, made to fit if it can be and if it is legal and keeps to the pins."""
    if any(plan[call].mesh != mesh for call, mesh in pins.items()) or not is_legal(question, plan):
        return []
    fitted = made_to_fit(question, replace(plan, name="auto"))
    return [] if fitted is None else [fitted]


def _of_each_preset(findings: Iterable[Finding]) -> tuple[PresetResult, ...]:
    """The faster of each preset's results; a result that fits is preferred."""
    results: dict[str, PresetResult] = {}
    for result in (preset for finding in findings for preset in finding.presets):
        known = results.get(result.name, result)
        results[result.name] = min((known, result), key=lambda one: one.estimate.seconds if one.estimate else math.inf)
    return tuple(results.values())


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


def _improved(question: Question, space: PlanSpace, starts: Sequence[ExecutionPlan], budget: Budget) -> ExecutionPlan:
    """The best result of a local search from each start; an unused share of the budget is left for the other starts."""
    meter, improved = Meter(budget), []
    for index, start in enumerate(starts):
        share = Meter(meter.left.times(1 / (len(starts) - index)))
        improved.append(improve_locally(question, replace(start, name="auto"), space, share))
        meter.spend(share.spent)
    return min(improved, key=question.seconds)


def _starts(
    question: Question,
    timed: Sequence[tuple[ExecutionPlan, float]],
    count: int,
    taking_turns: Sequence[ExecutionPlan] = (),
) -> list[ExecutionPlan]:
    """Make the fastest `2 * count` plans resident if possible, then return the fastest `count`.

    The fastest of `taking_turns` made resident is a further start on up to `MOST_DEVICES`: its offloads hide how fast
    its meshes and strategies are.
    """

    def resident(plans: Iterable[ExecutionPlan]) -> list[tuple[ExecutionPlan, float]]:
        staying = (keep_resident_where_free(question, plan) for plan in plans)
        return [(plan, question.seconds(plan)) for plan in staying]

    near = resident(differently_placed(timed)[: 2 * count])
    turns = resident(taking_turns if question.site.mesh.num_devices <= MOST_DEVICES else ())
    fastest, further = differently_placed(near + turns)[:count], differently_placed(turns)[:1]
    return [*fastest, *(plan for plan in further if plan.placements not in [each.placements for each in fastest])]


def _starts_with_rows_first(
    question: Question, timed: Sequence[tuple[ExecutionPlan, float]], count: int
) -> list[ExecutionPlan]:
    """The fastest starts if the rows of all calls move first; on many devices a single start, or no start."""
    num_devices = question.site.mesh.num_devices
    if num_devices > MOST_DEVICES_AHEAD:
        return []
    first = [rows_first(question, plan) for plan, _ in timed]
    most = count if num_devices <= MOST_DEVICES else 1
    starts = _starts(question, [(plan, question.seconds(plan)) for plan in first], most)
    return [start for start in starts if question.fits(start)]


def _finished(question: Question, plan: ExecutionPlan, space: PlanSpace) -> ExecutionPlan:
    """Apply the final passes: place computations, drop needless offloads, choose recomputed layers and cuts."""
    placed = keep_resident_where_free(question, _place_computations(question, plan))
    return with_fewest_cuts(question, with_least_recomputation(question, placed, space.context), space.context)


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
