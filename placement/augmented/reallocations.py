"""Insert the moves of weights: from the instance that trained a version to those that use it."""

from __future__ import annotations

from collections import defaultdict

from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder, Priority
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.priority import CallPriorities, just_after, just_before
from prefect_rlhf.placement.augmented.unroll import run_id
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.mesh import union
from prefect_rlhf.placement.plan import (
    ExecutionPlan,
    ModelInstance,
    labels,
    offloaded_parts,
    trained_instance,
)


def _readers(draft: GraphBuilder) -> dict[ModelInstance, dict[int, list[Node]]]:
    """The calls that use each instance, by the weight version they read, in the order of their priorities."""
    found: dict[ModelInstance, dict[int, list[Node]]] = defaultdict(lambda: defaultdict(list))
    for node in sorted(draft.nodes.values(), key=lambda node: draft.priority(node.id)):
        if node.instance is not None and node.reads is not None:
            found[node.instance][node.reads].append(node)
    return found


def _add_reallocations(draft: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, order: CallPriorities) -> None:
    """Bring each version to the instances that read it and do not train it; version 0 comes from the checkpoint."""
    names = labels(graph, plan)
    away = tuple(instance for instance, part in offloaded_parts(graph, plan).items() if part == "all")
    for instance, by_version in _readers(draft).items():
        source = trained_instance(graph, plan, instance.role)
        if source is None or source == instance:
            continue
        before: list[str] = []  # nodes that use the version held before
        for version, readers in sorted(by_version.items()):
            if version > 0:
                trained = _trained_by(graph, instance.role, version)
                made = Dependency(trained, "version", f"{instance.role} v{version}")
                waits = (made,) if trained in draft.nodes else ()  # else it ran before the checkpoint to go on from
                node = _reallocation(source, instance, version, readers[0], names[instance], waits)
                draft.add(node, _when_to_move(draft, order, node, readers[0], away))
                draft.wait(node.id, *(Dependency(id, "overwrite", instance.name) for id in before))
                for reader in readers:
                    arrived = Dependency(node.id, "version", f"{instance.role} v{version}")
                    draft.replace_dependency(reader.id, trained, arrived)
                before = [node.id]
            before += [reader.id for reader in readers]


def _when_to_move(
    draft: GraphBuilder, order: CallPriorities, node: Node, reader: Node, away: tuple[ModelInstance, ...]
) -> Priority:
    """At the start of its step; but bring no instance back to its devices a second time for it."""
    assert reader.call is not None  # a reader is a call
    if node.target in away:
        return just_before(draft.priority(reader.id))
    if node.source in away and node.depends_on:
        return just_after(draft.priority(node.depends_on[0]))  # its train_step
    assert node.reads is not None  # a reallocate brings a version
    return order.weights_of(reader.call, min(node.reads, reader.step))  # a stale reader's is there before its step


def _reallocation(
    source: ModelInstance,
    target: ModelInstance,
    version: int,
    reader: Node,
    name: str,
    waits: tuple[Dependency, ...],
) -> Node:
    suffix = "" if version == reader.step else f".v{version}"  # two versions may arrive in one step, one of them this
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


def _trained_by(graph: DataflowGraph, role: str, version: int) -> str:
    trainer = graph.trained_by(role)
    assert trainer is not None  # only asked of trained roles
    return run_id(trainer.name, version - 1)
