"""Insert the moves of weights, from the instance that trained a version to the instances that use it."""

from __future__ import annotations

from collections import defaultdict

from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder, Priority
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.priority import CallPriorities, just_after, just_before
from prefect_rlhf.placement.augmented.unroll import train_run_id
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.mesh import union
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, labels, offloaded_parts, trained_instance


def add_reallocations(
    builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, priorities: CallPriorities
) -> None:
    """Bring each version to the instances that read it and do not train it; version 0 comes from the checkpoint."""
    names = labels(graph, plan)
    offloaded = {instance for instance, part in offloaded_parts(graph, plan).items() if part == "all"}
    readers_of = _readers(builder)
    for instance in names:  # the same order for any unrolled steps
        by_version, source = readers_of[instance], trained_instance(graph, plan, instance.role)
        if source is None or source == instance:
            continue
        before: list[str] = []  # nodes that use the version held before
        for version, readers in sorted(by_version.items()):
            if version > 0:
                trained, label = train_run_id(graph, instance.role, version), f"{instance.role} v{version}"
                resumed = trained not in builder.nodes  # it ran before the checkpoint that the run goes on from
                waits = () if resumed else (Dependency(trained, "version", label),)
                node = _reallocation(source, instance, version, readers[0], names[instance], waits)
                builder.add(node, _when_to_move(builder, priorities, node, readers[0], offloaded))
                builder.wait(node.id, *(Dependency(id, "overwrite", instance.name) for id in before))
                for reader in readers:
                    builder.replace_dependency(reader.id, trained, Dependency(node.id, "version", label))
                before = [node.id]
            before += [reader.id for reader in readers]


def _readers(builder: GraphBuilder) -> dict[ModelInstance, dict[int, list[Node]]]:
    """Return the calls that use each instance, by the weight version they read, in the order of their priorities."""
    readers: dict[ModelInstance, dict[int, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for node in sorted(builder.nodes.values(), key=lambda node: builder.priority(node.id)):
        if node.instance is not None and node.reads is not None:
            readers[node.instance][node.reads].append(node)
    return readers


def _reallocation(
    source: ModelInstance,
    target: ModelInstance,
    version: int,
    reader: Node,
    name: str,
    waits: tuple[Dependency, ...],
) -> Node:
    suffix = "" if version == reader.step else f".v{version}"  # two versions may arrive in a step
    return Node(
        id=f"reallocate.{name}{suffix}@{reader.step}",
        kind="reallocate",
        step=reader.step,
        meshes=union((source.mesh, target.mesh)),
        dependencies=waits,
        reason=f"{reader.id} reads v{version} in {target.name}, which does not hold it; {source.name} trained it.",
        source=source,
        target=target,
        reads=version,
    )


def _when_to_move(
    builder: GraphBuilder, priorities: CallPriorities, node: Node, reader: Node, offloaded: set[ModelInstance]
) -> Priority:
    """Move at the start of the reader's step; but bring no instance back to its devices a second time for it."""
    assert reader.call is not None and node.reads is not None  # a reader is a call, a reallocate brings a version
    if node.target in offloaded:
        return just_before(builder.priority(reader.id))
    if node.source in offloaded and node.depends_on:
        return just_after(builder.priority(node.depends_on[0]))  # its train_step
    return priorities.weights_of(reader.call, min(node.reads, reader.step))  # stale weights arrive before their step
