"""Insert the moves of weights, from the instance that trained a version to the instances that use it."""

from __future__ import annotations

from collections import defaultdict

from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder, Priority
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.offloading import is_overwritten
from prefect_rlhf.placement.augmented.priority import CallPriorities, just_after, just_before
from prefect_rlhf.placement.augmented.unroll import train_run_id
from prefect_rlhf.placement.augmented.work import ModelCall, Reallocate
from prefect_rlhf.placement.devices.mesh import union
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, labels, offloaded_parts, trained_instance


def add_reallocations(
    builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, priorities: CallPriorities
) -> None:
    """Bring each version to the instances that read it and do not train it.

    Version 0 comes from the model's folder, except to an offloaded copy, which left its devices without weights.
    """
    names = labels(graph, plan)
    offloaded = {instance for instance, part in offloaded_parts(graph, plan).items() if part == "all"}
    readers_of = _readers(builder)
    for instance in names:  # the same order for any unrolled steps
        by_version, source = readers_of[instance], trained_instance(graph, plan, instance.role)
        if source is None or source == instance:
            continue
        before: list[str] = []  # nodes that use the version held before
        for version, readers in sorted(by_version.items()):
            if version > 0 or (instance in offloaded and is_overwritten(graph, plan, instance)):
                trained, label = train_run_id(graph, instance.role, version), f"{instance.role} v{version}"
                resumed = trained not in builder.nodes  # it ran before the checkpoint that the run goes on from
                waits = () if resumed else (Dependency(trained, "version", label),)
                move = Reallocate(source, instance, version)
                node = _reallocation(move, readers[0][0], names[instance], waits)
                builder.add(node, _when_to_move(builder, priorities, move, waits, readers[0], offloaded))
                builder.wait(node.id, *(Dependency(id, "overwrite", instance.name) for id in before))
                for reader, _ in readers:
                    builder.replace_dependency(reader.id, trained, Dependency(node.id, "version", label))
                before = [node.id]
            before += [reader.id for reader, _ in readers]


def _readers(builder: GraphBuilder) -> dict[ModelInstance, dict[int, list[tuple[Node, Call]]]]:
    """Return the calls that use each instance, by the weight version they read, in the order of their priorities."""
    readers: dict[ModelInstance, dict[int, list[tuple[Node, Call]]]] = defaultdict(lambda: defaultdict(list))
    for node in sorted(builder.nodes.values(), key=lambda node: builder.priority(node.id)):
        if isinstance(node.work, ModelCall):
            readers[node.work.instance][node.work.reads].append((node, node.work.call))
    return readers


def _reallocation(move: Reallocate, reader: Node, name: str, waits: tuple[Dependency, ...]) -> Node:
    source, target, version = move.source, move.target, move.reads
    suffix = "" if version == reader.step else f".v{version}"  # two versions may arrive in a step
    return Node(
        id=f"reallocate.{name}{suffix}@{reader.step}",
        step=reader.step,
        meshes=union((source.mesh, target.mesh)),
        dependencies=waits,
        reason=f"{reader.id} reads v{version} in {target.name}, which does not hold it; {source.name} trained it.",
        work=move,
    )


def _when_to_move(
    builder: GraphBuilder,
    priorities: CallPriorities,
    move: Reallocate,
    waits: tuple[Dependency, ...],
    reader: tuple[Node, Call],
    offloaded: set[ModelInstance],
) -> Priority:
    """Move at the start of the reader's step; but bring no instance back to its devices a second time for it."""
    node, call = reader
    if move.target in offloaded:
        return just_before(builder.priority(node.id))
    if move.source in offloaded and waits:
        return just_after(builder.priority(waits[0].node))  # its train_step
    return priorities.weights_of(call, min(move.reads, node.step))  # stale weights arrive before their step
