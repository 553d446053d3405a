"""Insert the writing of a run's state to disk, and the waits of what would overwrite it too early.

After a step that ends a period, and after the last one, each trained role has a `checkpoint` node: its shards are
written beside the last checkpoint. One `commit` node then adds what is small and renames: now they are the newest one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.priority import checkpoint_of, commit_of
from prefect_rlhf.placement.augmented.unroll import run_id, train_run_id
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, trained_instance


@dataclass(frozen=True, slots=True)
class StepRange:
    """The steps that a run makes, and how often it writes a checkpoint.

    `first` is 0, or the step that the checkpoint it goes on from was written before: then each trained role starts with
    weights v`first`. `every` None: never.
    """

    num_steps: int
    first: int = 0
    every: int | None = None

    def checkpointed(self) -> tuple[int, ...]:
        """Return the steps after which a checkpoint is written.

        >>> StepRange(num_steps=5, every=2).checkpointed(), StepRange(num_steps=5, first=4, every=2).checkpointed()
        ((1, 3, 4), (4,))
        """
        if self.every is None:
            return ()
        steps = range(self.first, self.num_steps)
        return tuple(step for step in steps if (step + 1) % self.every == 0 or step + 1 == self.num_steps)

    def drained(self, step: int) -> int:
        """Return the oldest weight version that a call at `step` may read: that of the last checkpoint before it.

        What was written is then all that the rest of the run starts from, also where staleness lets a call read older
        weights: right after a checkpoint it reads the newest.

        >>> [StepRange(num_steps=5, every=2).drained(step) for step in range(5)]
        [0, 0, 2, 2, 4]
        """
        return max(self.first, 0 if self.every is None else step // self.every * self.every)


def add_checkpoints(builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, steps: StepRange) -> None:
    """Insert the nodes; a computation that would change its state waits until the state before is on disk.

    That a train_step waits for the checkpoint of what it overwrites is seen to with all other readers.
    """
    trained = [
        instance for model in graph.models if (instance := trained_instance(graph, plan, model.role)) is not None
    ]
    before: tuple[Dependency, ...] = ()
    for step in steps.checkpointed() if trained else ():
        shards = [_checkpoint(graph, instance, step) for instance in trained]
        for position, node in enumerate(shards):
            builder.add(node, checkpoint_of(step, position))
        commit = _commit(builder, graph, plan, step, shards)
        builder.add(commit, commit_of(step))
        builder.wait(commit.id, *before)
        before = (Dependency(commit.id, "state", "the newest checkpoint"),)
        for call in stateful_calls(graph):
            following = _first_run(builder, call, range(step + 1, steps.num_steps + 1))
            if following is not None:
                builder.wait(following, Dependency(commit.id, "overwrite", call.name))


def stateful_calls(graph: DataflowGraph) -> tuple[Call, ...]:
    """Return the computations that carry state from step to step."""
    return tuple(call for call in graph if call.stateful)


def _checkpoint(graph: DataflowGraph, instance: ModelInstance, step: int) -> Node:
    version = f"{instance.role} v{step + 1}"
    return Node(
        id=f"checkpoint.{instance.role}@{step}",
        kind="checkpoint",
        step=step,
        meshes=(instance.mesh,),
        dependencies=(Dependency(train_run_id(graph, instance.role, step + 1), "version", version),),
        reason=f"a run that ends after step {step} goes on from {version} and its optimizer.",
        instance=instance,
        reads=step + 1,
    )


def _commit(builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, step: int, shards: list[Node]) -> Node:
    """Return the node, on the devices whose ranks hold the states of computations."""
    written = (Dependency(node.id, "version", f"{node.instance.role} v{step + 1}") for node in shards if node.instance)
    stateful = stateful_calls(graph)
    states = (
        Dependency(latest, "state", call.name)
        for call in stateful
        if (latest := _first_run(builder, call, range(step, -1, -1))) is not None
    )
    return Node(
        id=f"commit@{step}",
        kind="commit",
        step=step,
        meshes=tuple(dict.fromkeys(plan[call.name].mesh for call in stateful)),
        dependencies=(*written, *states),
        reason="all shards are written beside: adding what is small and renaming makes them the newest checkpoint.",
    )


def _first_run(builder: GraphBuilder, call: Call, steps: Iterable[int]) -> str | None:
    """Return the call's run at the first of these steps that has one."""
    return next((id for step in steps if (id := run_id(call.name, step)) in builder.nodes), None)
