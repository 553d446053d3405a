"""Augment a graph under a plan: insert every move of weights and rows that the plan needs.

The order is: the runs of all calls; `reallocate`, if an instance lacks the version that it reads, and the waits of
train_steps that let it pass; `follow`; `checkpoint` and `commit`; the waits of each train_step and each follow for the
readers of the version that it overwrites; `transfer`, if a call's devices lack rows; `export` of trained models; the
cut of calls and their transfers into parts; `reload` and `offload`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.checkpointing import StepRange, add_checkpoints
from prefect_rlhf.placement.augmented.feeds import feeds
from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.offloading import add_offloads
from prefect_rlhf.placement.augmented.parts import cut_into_parts
from prefect_rlhf.placement.augmented.priority import CallPriorities, export_of
from prefect_rlhf.placement.augmented.reallocations import add_follows, add_reallocations
from prefect_rlhf.placement.augmented.unroll import CallRun, run_id, train_run_id, unroll
from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Export,
    Follow,
    ModelCall,
    Reallocate,
    TrainStep,
    Transfer,
    work_of,
)
from prefect_rlhf.placement.devices.mesh import union
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, trained_instance
from prefect_rlhf.placement.rows.moves import RowMove


def augment(
    graph: DataflowGraph, plan: ExecutionPlan, num_steps: int, finished: int = 0, checkpoint_every: int | None = None
) -> AugmentedGraph:
    """Return every task run of `num_steps` steps under `plan`. Evaluation calls run before and after training too.

    With `finished`, return the remaining task runs of a run that resumes from the checkpoint written after that many
    steps. With `checkpoint_every`, insert a checkpoint after every `checkpoint_every` steps and after the last step.
    The plan must be accepted by `check_plan`. Raises GraphError if the plan makes nodes wait for each other.
    """
    steps = StepRange(num_steps, finished, checkpoint_every)
    return AugmentedGraph(graph, plan, num_steps, unrolled_nodes(graph, plan, steps, steps.all()), finished)


def unrolled_nodes(
    graph: DataflowGraph, plan: ExecutionPlan, steps: StepRange, unrolled: Sequence[int]
) -> tuple[Node, ...]:
    """Return the task runs of the given steps, each after its dependencies.

    They have no dependency outside these steps. Nodes near either end may differ from the same nodes of the whole
    graph, because steps that are not unrolled decide when weights are loaded and dropped. `step_groups` states how far
    that effect reaches.
    """
    builder = GraphBuilder()
    priorities = CallPriorities.of(graph)
    for run in _runs(graph, steps, unrolled):
        builder.add(_call_node(graph, plan, run), priorities.call(run.call, run.step))
    add_reallocations(builder, graph, plan, priorities)
    add_follows(builder, graph, plan, steps, unrolled)
    add_checkpoints(builder, graph, plan, steps, unrolled)
    _add_overwrites(builder)
    _add_transfers(builder, graph, plan, priorities)
    if steps.exports and steps.num_steps in unrolled:
        _add_exports(builder, graph, plan, steps.num_steps)
    cut_into_parts(builder, graph, plan)
    add_offloads(builder, graph, plan, steps)
    return builder.ordered()


def _runs(graph: DataflowGraph, steps: StepRange, unrolled: Sequence[int]) -> Iterator[CallRun]:
    """Yield the runs of all calls in these steps, without dependencies on other steps."""
    runs = unroll(graph, steps.num_steps, steps.finished, steps.drained, unrolled)
    if not steps.exports:
        runs = tuple(run for run in runs if run.step < steps.num_steps or run.call.every is None)
    ids = {run.id for run in runs}
    for run in runs:
        known = tuple([dependency for dependency in run.dependencies if dependency.node in ids])
        yield run if len(known) == len(run.dependencies) else replace(run, dependencies=known)


def _call_node(graph: DataflowGraph, plan: ExecutionPlan, run: CallRun) -> Node:
    call, placement = run.call, plan[run.call.name]
    evaluation = f"as evaluation before training, every {call.every} steps and after the last step"
    when = "in every step" if call.every is None else evaluation
    return Node(
        id=run.id,
        step=run.step,
        meshes=(placement.mesh,),
        dependencies=run.dependencies,
        reason=f"flow {graph.name} makes this call {when}.",
        work=work_of(call, placement, run.reads),
    )


def _add_overwrites(builder: GraphBuilder) -> None:
    """Make each train_step and each follow wait for all readers of the version that it overwrites in its storage."""
    users: dict[tuple[ModelInstance, int], list[str]] = defaultdict(list)
    for node in builder.nodes.values():
        match node.work:
            case ModelCall(_, storage, version) | Reallocate(storage, _, version) | Checkpoint(storage, version):
                users[storage, version].append(node.id)
            case Follow(storage, _, version):
                users[storage, version].append(node.id)
    for node in tuple(builder.nodes.values()):
        match node.work:
            case TrainStep(_, storage, version) | Follow(_, storage, _, version):
                waits = (Dependency(id, "overwrite", f"v{version}") for id in users[storage, version])
                builder.wait(node.id, *waits)


def _add_transfers(
    builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, priorities: CallPriorities
) -> None:
    """Bring rows before a call whose devices lack them; a transfer made for an earlier call may serve it too."""
    by_call = feeds(graph, plan, priorities)

    def transfer_id(consumer: str, producer: str, step: int) -> str:
        suffix = f".{producer}" if by_call[consumer].goes_ahead(producer) else ""
        return f"transfer.{consumer}{suffix}@{step}"

    for node in tuple(builder.nodes.values()):
        call = node.call
        if call is None or call.name not in by_call:
            continue
        feed, consumer = by_call[call.name], call.name
        for moves in feed.transfers:
            transfer = _transfer(plan, node, call, moves, transfer_id(consumer, moves[0].producer, node.step))
            producers = [move.producer for move in moves]
            builder.add(transfer, priorities.transfer_to(call, node.step, producers, plan))
            builder.wait(node.id, Dependency(transfer.id, "data", _keys(moves)))
        for shared in feed.shared:
            id = transfer_id(shared.consumer, shared.move.producer, node.step)
            builder.wait(node.id, Dependency(id, "data", _keys((shared.move,))))
        for producer, local in feed.local.items():
            run = run_id(producer, node.step)
            if local != graph.reads_of(consumer)[producer]:  # wait for it only if its rows are read from there
                stay = (Dependency(run, "data", ", ".join(local)),) if local else ()
                builder.replace_dependency(node.id, run, *stay)


def _transfer(plan: ExecutionPlan, consumer: Node, call: Call, moves: tuple[RowMove, ...], id: str) -> Node:
    choices = tuple(Dependency(run_id(name, consumer.step), "data") for name in call.waits_for_choices)
    return Node(
        id=id,
        step=consumer.step,
        meshes=union((*(plan[move.producer].mesh for move in moves), *consumer.meshes)),
        dependencies=tuple(
            Dependency(run_id(move.producer, consumer.step), "data", ", ".join(move.keys)) for move in moves
        )
        + choices,
        reason=f"the devices of {consumer.id} lack rows of {_keys(moves)} made elsewhere.",
        work=Transfer(call, moves),
    )


def _keys(moves: Iterable[RowMove]) -> str:
    return ", ".join(f"{move.producer}.{key}" for move in moves for key in move.keys)


def _add_exports(builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, num_steps: int) -> None:
    """Write the last version of each trained role to disk when all steps are over."""
    for position, model in enumerate(graph.models):
        instance = trained_instance(graph, plan, model.role)
        if instance is None or num_steps == 0:
            continue
        trained = train_run_id(graph, model.role, num_steps)
        waits = (Dependency(trained, "version", f"{model.role} v{num_steps}"),) if trained in builder.nodes else ()
        node = Node(
            id=f"export.{model.role}@{num_steps}",
            step=num_steps,
            meshes=(instance.mesh,),
            dependencies=waits,
            reason=f"the run ends with {model.role} v{num_steps}, and its result is this model.",
            work=Export(instance, num_steps),
        )
        builder.add(node, export_of(num_steps, position))
