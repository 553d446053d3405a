"""Inserts the moves of weights from the instance that trained a version to its users and followers.

A train_step that can run during the next step first lets pass the weights that this step begins with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prefect_rlhf.placement.augmented.checkpointing import StepRange
from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder, Priority
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.offloading import is_overwritten
from prefect_rlhf.placement.augmented.priority import CallPriorities, just_after, just_before
from prefect_rlhf.placement.augmented.unroll import follow_id, run_id, train_run_id
from prefect_rlhf.placement.augmented.work import Follow, ModelCall, Reallocate
from prefect_rlhf.placement.devices.mesh import union
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, labels, offloaded_parts, trained_instance


def add_reallocations(
    builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, priorities: CallPriorities
) -> None:
    """Bring each version to the instances that read it without training it.

    Version 0 comes from the model's folder, except for an offloaded copy, which has no weights on its devices.
    """
    names = labels(graph, plan)
    offloaded = {instance for instance, part in offloaded_parts(graph, plan).items() if part == "all"}
    readers_of, arrives_early = _readers(builder), list[str]()
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
                first, call = readers[0]
                is_fresh = version == (first.step - 1 if call.every is None else first.step)
                if is_fresh and (instance not in offloaded or priorities.levels[call.name] == 0):
                    arrives_early.append(node.id)
                builder.wait(node.id, *(Dependency(id, "overwrite", instance.name) for id in before))
                for reader, _ in readers:
                    builder.replace_dependency(reader.id, trained, Dependency(node.id, "version", label))
                before = [node.id]
            before += [reader.id for reader, _ in readers]
    _let_fresh_weights_pass(builder, graph, plan, priorities, arrives_early)


def add_follows(
    builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, steps: StepRange, unrolled: Iterable[int]
) -> None:
    """Make each follower instance follow its leader, and make its readers wait for the version that they read.

    A follow runs directly after its leader's train_step. Version 0 comes from the model's folder.
    """
    names, readers_of = labels(graph, plan), _readers(builder)
    for instance, name in names.items():
        follows = graph.model(instance.role).follows
        if follows is None:
            continue
        source = trained_instance(graph, plan, follows.leader)
        assert source is not None  # a leader is trained
        for step in unrolled:
            if step % follows.every or not steps.finished < step <= steps.num_steps:
                continue
            trained = train_run_id(graph, follows.leader, step)
            node = _follow(Follow(source, instance, step, step - follows.every, follows.share), name, trained)
            builder.add(node, just_after(builder.priority(trained)))
            if (before := follow_id(name, step - follows.every)) in builder.nodes:
                builder.wait(node.id, Dependency(before, "version", f"{instance.role} v{step - follows.every}"))
        for version, readers in readers_of[instance].items():
            made = follow_id(name, version)
            for reader, _ in readers if made in builder.nodes else ():
                builder.wait(reader.id, Dependency(made, "version", f"{instance.role} v{version}"))


def _follow(work: Follow, name: str, trained: str) -> Node:
    leader, own = work.source.role, work.target.role
    return Node(
        id=follow_id(name, work.writes),
        step=work.reads,
        meshes=union((work.source.mesh, work.target.mesh)),
        dependencies=(Dependency(trained, "version", f"{leader} v{work.reads}"),),
        reason=f"{own} follows {leader}: {work.share:g} of {leader} v{work.reads}, and the rest of {own} v{work.held}.",
        work=work,
    )


def trained_behind(graph: DataflowGraph, priorities: CallPriorities) -> Iterator[tuple[Call, Call]]:
    """Yield pairs of train_steps in which the next step begins with the first's weights, but not with the second's.

    The second comes later in the step, and no call of its step reads the weights that it makes. With staleness such
    pairs do not occur.
    """
    begins = {call.role for call in graph if call.every is None and priorities.levels[call.name] == 0}
    edges = [edge for edge in graph.version_edges() if graph.call(edge.target).every is None]
    read_at_once = {edge.source for edge in edges if edge.lag == 0}
    trainers = [call for call in graph if call.kind == "train_step"]
    for first in trainers:
        for second in trainers:
            in_order = priorities.call(first, 0) < priorities.call(second, 0) and second.name not in read_at_once
            if in_order and graph.staleness == 0 and first.role in begins and second.role not in begins:
                yield first, second


def _let_fresh_weights_pass(
    builder: GraphBuilder,
    graph: DataflowGraph,
    plan: ExecutionPlan,
    priorities: CallPriorities,
    arrives_early: Iterable[str],
) -> None:
    """Let a train_step wait until the weights that the next step begins with have left its devices.

    The train_step then runs while the next step generates on other devices. Without the wait it would go first, and
    the next step would begin after it. The wait is for the reallocations in `arrives_early`, of weights that a step
    has just made. The others come directly before a later call of the next step, so the train_step would wait for the
    generation.
    """
    pairs = tuple(trained_behind(graph, priorities))
    for node in [builder.nodes[name] for name in arrives_early]:
        assert isinstance(node.work, Reallocate)
        source, target, version = node.work.source, node.work.target, node.work.reads
        for first, second in pairs:
            mesh, run = plan[second.name].mesh, run_id(second.name, version)
            may_run_beside = mesh.overlaps(source.mesh) and not mesh.overlaps(target.mesh)
            if source.role == first.role and may_run_beside and run in builder.nodes:
                builder.wait(run, Dependency(node.id, "order", f"{source.role} v{version}"))


def _readers(builder: GraphBuilder) -> dict[ModelInstance, dict[int, list[tuple[Node, Call]]]]:
    """Return the calls that use each instance, by the weight version they read, in the order of their priorities."""
    readers: dict[ModelInstance, dict[int, list[tuple[Node, Call]]]] = defaultdict(lambda: defaultdict(list))
    for node in sorted(builder.nodes.values(), key=lambda node: builder.priority(node.id)):
        if isinstance(node.work, ModelCall):
            readers[node.work.instance][node.work.reads].append((node, node.work.call))
    return readers


def _reallocation(move: Reallocate, reader: Node, name: str, waits: tuple[Dependency, ...]) -> Node:
    source, target, version = move.source, move.target, move.reads
    suffix = "" if version == reader.step - 1 else f".v{version}"  # two versions may arrive in a step
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
    if call.every is not None:
        return priorities.weights_of(call, node.step)
    return priorities.weights_of(call, min(move.reads + 1, node.step))  # stale weights arrive before their step
