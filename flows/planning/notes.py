"""Notes of an answer: things about this plan that you can act on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from prefect_rlhf.files.gpus import LEAST_CAPABILITY
from prefect_rlhf.flows.planning.assumptions import assumed_of_models, assumed_of_rows
from prefect_rlhf.flows.planning.hints import uneven_batch
from prefect_rlhf.flows.training.choice.searched_plan import SHOWN_SHARE
from prefect_rlhf.placement.cost.datasheets.kinds import NO_BFLOAT16, OF_ROCM
from prefect_rlhf.placement.cost.paged_cache import in_flight
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.sharing import borrowers, sharers
from prefect_rlhf.placement.memory.certificate import NEARLY_FULL
from prefect_rlhf.placement.memory.processes import host_needs
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.rows.token_writers import shared_rows
from prefect_rlhf.placement.schedule.throughput import IterationWork

PROVED = "proved: no plan is faster than this one"


def notes(question: Question, planned: Planned, work: IterationWork, *, states_imbalance: bool) -> Iterator[str]:
    """Yield an answer's notes, obstacles to a run first."""
    yield from not_run(question)
    if hint := uneven_batch(question):
        yield hint
    used = planned.certificate.used_share(planned.plan.cluster.kept_share)
    if used > NEARLY_FULL:
        yield f"{used:.1%} of a device is nearly all of it: --headroom 5% keeps room for longer rows"
    yield from of_calls(question, planned.plan)
    if question.site.backend == "cpu":
        needs = host_needs(planned.certificate).values()
        yield f"memory of its processes: {max(needs, key=lambda need: need.usual_bytes)}"
    yield from bases(question.graph, planned.plan)
    yield from (f"assumed: {line}" for line in assumed_of_models(question))
    yield from (f"assumed: {line}" for line in assumed_of_rows(question, states_imbalance))
    if planned.dependence:
        yield f"{planned.dependence}; `prefect-rlhf profile` measures it on your devices"
    less, bound = 1 - planned.lower_bound_seconds / planned.seconds, f"{planned.lower_bound_seconds:.4g} s a step"
    best = f"no plan takes less than {bound}, {less:.1%} less than this one" if less >= SHOWN_SHARE else PROVED
    yield f"{best}; --explain shows the proof, the search, the memory, and why each call is where it is"
    if work.dollars_per_hour is None and question.site.backend == "cuda":
        kind = question.site.sources.nodes[0].device.name
        yield f"--price {kind}=2.5 adds dollars"


def of_calls(question: Question, plan: ExecutionPlan) -> Iterator[str]:
    """Yield in words the unusual decisions for the calls of every step; calls with the same words share a line."""
    found: dict[str, list[str]] = defaultdict(list)
    for call in question.graph:
        if call.role is not None and call.every is None:
            for words in of_placement(call, plan[call.name], question):
                found[words].append(call.name)
    yield from (f"{', '.join(names)}: {words}" for words, names in found.items())


def bases(graph: DataflowGraph, plan: ExecutionPlan) -> Iterator[str]:
    """Yield a line for each copy of frozen weights that several models or engines use."""
    lenders = borrowers(graph, plan)
    for holder, roles in sharers(graph, plan).items():
        others = dict.fromkeys(user.engine for user, lender in lenders.items() if lender == holder)
        where = f"once, on {holder.mesh.name} ({holder.strategy})"
        if others:
            yield f"{' and '.join((holder.engine, *others))} hold the base of {', '.join(roles)} {where}"
        elif holder not in lenders:
            yield f"{', '.join(roles)} hold their base {where}"


def of_placement(call: Call, placed: Placement, question: Question) -> Iterator[str]:
    """Describe a placement's unusual decisions, such as offloading or a limited cache."""
    if placed.offload != "none":
        what = "optimizer states" if placed.offload == "optimizer" else "weights"
        what = "weights and optimizer states" if (placed.offload, call.kind) == ("all", "train_step") else what
        back = "during the call before" if placed.prefetch else "only when the call starts, for want of memory"
        words = f"offload {placed.offload}" + ("" if placed.prefetch else ", prefetch no")
        yield f"{what} leave the devices while others use them, and return {back} ({words})"
    if placed.cache_gib is not None:
        sizes, rows = ModelSizes.of(question.graph.model(call.role or "")), _rows_of_a_replica(call, placed)
        held = in_flight(rows, placed.cache_bytes, question.workload, sizes, placed.strategy.tp).first
        holds = f"all {rows} rows" if held >= rows else f"about {held:.0f} of the {rows} rows"
        rest = "a row without room starts again later" if held >= rows else "the others wait for their turn"
        yield f"a cache of {placed.cache_gib:g} GiB holds {holds} of a replica at once; {rest}"


def rows_of_a_micro_batch(call: Call, placed: Placement) -> str:
    """Return a call's micro-batches with the rows of each: `128 of 1 row`; `1` for a single micro-batch."""
    count = placed.micro_batches
    if count == 1:
        return "1"
    rows = -(-_rows_of_a_replica(call, placed) // count)
    return f"{count} of {rows} row{'s' if rows > 1 else ''}"


def _rows_of_a_replica(call: Call, placed: Placement) -> int:
    """Rows of the fullest replica, of a mini-batch in training."""
    return call.most_items(placed.strategy.dp) * call.rows_per_item


def not_run(question: Question) -> Iterator[str]:
    """Yield a line for each kind of device and each model that can be planned but not run."""
    kinds = dict.fromkeys(node.device.name for node in question.site.sources.nodes)
    for kind in kinds:
        if kind in NO_BFLOAT16:
            least = f"a run needs {LEAST_CAPABILITY} or newer, for bfloat16"
            yield f"planned, but cannot run: {kind} has compute capability {NO_BFLOAT16[kind]}; {least}"
        if kind in OF_ROCM:
            yield f"planned, but cannot run yet: {kind} needs engines built for ROCm, and our pins are for CUDA"
    yield from models_not_run(question.graph)


def models_not_run(graph: DataflowGraph) -> Iterator[str]:
    """Yield a line for each model that can be planned but not run, or that lacks tokens in the rows it reads."""
    roles: dict[tuple[str, str], list[str]] = defaultdict(list)
    for model in graph.models:
        if model.shape.not_run:
            roles[model.path, model.shape.not_run].append(model.role)
    for rows in shared_rows(graph):
        writer, reader = (graph.model(role).shape.vocab_size for role in (rows.writer, rows.reader))
        if rows.is_sampled and reader < writer:
            yield (
                f"planned, but cannot run: {rows.reader}, whose vocabulary of {reader} lacks some of the {writer} "
                f"tokens that {rows.writer} may sample"
            )
    for (path, reason), played in roles.items():
        yield f"planned, but cannot run yet: {path} ({', '.join(played)}), since our engines do not run {reason}"
