"""From a graph and a plan to the augmented graph: insert every move of weights and rows that the plan needs.

In this order: the runs of all calls; `reallocate` where an instance lacks the version to be read; `checkpoint` and
`commit`; waits of each train_step for the readers of what it overwrites; `transfer` where a call's devices lack rows;
`export` of what was trained; `reload` and `offload`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.checkpointing import StepRange, add_checkpoints
from prefect_rlhf.placement.augmented.feeds import batches, feeds
from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder
from prefect_rlhf.placement.augmented.node import Dependency, Node, NodeKind
from prefect_rlhf.placement.augmented.offloading import add_offloads
from prefect_rlhf.placement.augmented.priority import CallPriorities, last
from prefect_rlhf.placement.augmented.reallocations import (
    _add_reallocations,
    _trained_by,
)
from prefect_rlhf.placement.augmented.unroll import CallRun, run_id, unroll
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.mesh import union
from prefect_rlhf.placement.plan import (
    ExecutionPlan,
    ModelInstance,
    instance_of,
    trained_instance,
)
from prefect_rlhf.placement.rows.moves import RowMove

__all__ = ["AugmentedGraph", "Dependency", "Node", "NodeKind", "RowMove", "augment"]


def augment(
    graph: DataflowGraph, plan: ExecutionPlan, num_steps: int, first_step: int = 0, checkpoint_every: int | None = None
) -> AugmentedGraph:
    """Every task run of `num_steps` steps under `plan`. Evaluation calls run once more, at step `num_steps`.

    With `first_step`, what is left of them for a run that goes on from the checkpoint written before that step. With
    `checkpoint_every`, a checkpoint after every so many steps and after the last. Expects a plan that `check_plan`
    accepts. Raises GraphError when the plan makes nodes wait for each other.
    """
    draft = GraphBuilder()
    order = CallPriorities.of(graph)
    span = StepRange(num_steps, first_step, checkpoint_every)
    for run in unroll(graph, num_steps, first_step, span.drained):
        draft.add(_call_node(graph, plan, run), order.call(run.call, run.step))
    _add_reallocations(draft, graph, plan, order)
    add_checkpoints(draft, graph, plan, span)
    _add_overwrites(draft)
    _add_transfers(draft, graph, plan, order)
    _add_exports(draft, graph, plan, num_steps)
    add_offloads(draft, graph, plan, first_step)
    return AugmentedGraph(graph, plan, num_steps, draft.ordered(), first_step)


def _call_node(graph: DataflowGraph, plan: ExecutionPlan, run: CallRun) -> Node:
    call, placement = run.call, plan[run.call.name]
    when = "in every step" if call.every is None else f"as evaluation every {call.every} steps and after the last one"
    return Node(
        id=run.id,
        kind=call.kind,
        step=run.step,
        meshes=(placement.mesh,),
        dependencies=run.dependencies,
        reason=f"flow {graph.name} makes this call {when}.",
        call=call,
        placement=placement,
        instance=instance_of(call, placement),
        reads=run.reads,
        writes=run.writes,
    )


def _add_overwrites(draft: GraphBuilder) -> None:
    """Each train_step waits for whatever still reads, from its own storage, the version that it overwrites."""
    users: dict[tuple[ModelInstance, int], list[str]] = defaultdict(list)
    for node in draft.nodes.values():
        storage = node.source or node.instance
        if storage is not None and node.reads is not None:
            users[storage, node.reads].append(node.id)
    for node in tuple(draft.nodes.values()):
        if node.kind == "train_step" and node.instance is not None and node.reads is not None:
            reading = users[node.instance, node.reads]
            draft.wait(node.id, *(Dependency(id, "overwrite", f"v{node.reads}") for id in reading))


def _add_transfers(draft: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, order: CallPriorities) -> None:
    """Before a call whose devices lack rows, bring them; a transfer made for an earlier call may serve it too."""
    by_call = feeds(graph, plan)
    made = {name: batches(graph, plan, name, feed.moves) for name, feed in by_call.items()}
    for node in tuple(draft.nodes.values()):
        if node.call is None or node.call.name not in by_call:
            continue
        feed = by_call[node.call.name]
        for moves in made[node.call.name]:
            transfer = _transfer(plan, node, moves, _transfer_id(made, node.call.name, moves[0].producer, node.step))
            draft.add(transfer, order.transfer_to(node.call, node.step, [move.producer for move in moves]))
            draft.wait(node.id, Dependency(transfer.id, "data", _keys(moves)))
        for share in feed.shared:
            id = _transfer_id(made, share.consumer, share.move.producer, node.step)
            draft.wait(node.id, Dependency(id, "data", _keys((share.move,))))
        for producer, local in feed.local.items():
            run = run_id(producer, node.step)
            if local != graph.reads_of(node.call.name)[producer]:  # wait for it only where its rows are used from there
                stay = (Dependency(run, "data", ", ".join(local)),) if local else ()
                draft.replace_dependency(node.id, run, *stay)


def _add_exports(draft: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, num_steps: int) -> None:
    """When all steps are over, write the last version of each trained role to disk."""
    for position, model in enumerate(graph.models):
        instance = trained_instance(graph, plan, model.role)
        if instance is None or num_steps == 0:
            continue
        trained = Dependency(_trained_by(graph, model.role, num_steps), "version", f"{model.role} v{num_steps}")
        node = Node(
            id=f"export.{model.role}@{num_steps}",
            kind="export",
            step=num_steps,
            meshes=(instance.mesh,),
            dependencies=(trained,),
            reason=f"the run ends with {model.role} v{num_steps}, which is what it was for.",
            instance=instance,
            reads=num_steps,
        )
        draft.add(node, last(num_steps, position))


def _transfer(plan: ExecutionPlan, consumer: Node, moves: tuple[RowMove, ...], id: str) -> Node:
    assert consumer.call is not None and consumer.placement is not None  # only calls are fed
    producers = [(move.producer, run_id(move.producer, consumer.step)) for move in moves]
    labels_by_producer = {move.producer: ", ".join(move.keys) for move in moves}
    return Node(
        id=id,
        kind="transfer",
        step=consumer.step,
        meshes=union((*(plan[name].mesh for name, _ in producers), *consumer.meshes)),
        dependencies=tuple(Dependency(run, "data", labels_by_producer[name]) for name, run in producers),
        reason=f"the devices of {consumer.id} lack rows of {_keys(moves)} made elsewhere.",
        call=consumer.call,
        placement=consumer.placement,
        moves=moves,
    )


def _transfer_id(made: Mapping[str, Sequence[Sequence[RowMove]]], consumer: str, producer: str, step: int) -> str:
    """The transfer to `consumer` that brings rows of `producer`; one that goes ahead is named after both."""
    ahead = producer in (move.producer for moves in made[consumer][:-1] for move in moves)
    return f"transfer.{consumer}{f'.{producer}' if ahead else ''}@{step}"


def _keys(moves: Iterable[RowMove]) -> str:
    return ", ".join(f"{move.producer}.{key}" for move in moves for key in move.keys)
