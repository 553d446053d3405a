"""Inserts nodes that write a run's state to disk, and dependencies that keep other nodes from overwriting it too early.

When a checkpoint is due, and after the last step, each trained role has a `checkpoint` node: its ranks copy their state
into host memory, and the next train_step may begin. The `commit` node then writes all copies next to the last
checkpoint, adds the small files and renames the folder, which makes it the newest checkpoint. It waits for its step's
evaluation, because a resumed run does not repeat earlier steps. The next copy waits for the commit, so at most a single
copy exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.priority import checkpoint_of, commit_of
from prefect_rlhf.placement.augmented.unroll import follow_id, latest_run, run_id, train_run_id
from prefect_rlhf.placement.augmented.work import Checkpoint, Commit
from prefect_rlhf.placement.devices.mesh import union
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, labels, stored_instance


@dataclass(frozen=True, slots=True)
class StepRange:
    """A run's steps, which count from 1, and how often it writes a checkpoint."""

    num_steps: int
    finished: int = 0
    """Steps made before, up to the checkpoint that the run resumes from: each trained role starts with weights
    v`finished`."""
    every: int | None = None
    """With None, the run writes no checkpoint."""
    stopped: int | None = None
    """The step after which the run stops, with a checkpoint there."""
    exports: bool = True
    """Without it, the last step ends the run, without evaluation."""
    moving: frozenset[str] | None = None
    """Roles whose state is copied to host memory, because the run stops to switch to another plan."""

    def all(self) -> range:
        """Return the steps. Step 0 has only the evaluation before training, if any.

        After a checkpoint of the last step, only that step's exports are left.

        >>> StepRange(num_steps=3).all(), StepRange(num_steps=3, finished=1, stopped=2).all()
        (range(0, 4), range(2, 3))
        """
        first = self.finished + 1 if self.finished else 0
        last = self.num_steps if self.stopped is None else self.stopped
        return range(min(first, self.num_steps) if self.exports else first, last + 1)

    def is_checkpointed(self, step: int) -> bool:
        """Whether a checkpoint is written after `step`.

        >>> [step for step in range(7) if StepRange(num_steps=5, every=2).is_checkpointed(step)]
        [2, 4, 5]
        """
        return self._is_regular(step) or self.is_extra(step)

    def is_extra(self, step: int) -> bool:
        """Whether the checkpoint after `step` is written only because the run is stopped there."""
        return step == self.stopped and step > self.finished and not self._is_regular(step)

    def is_committed(self, step: int) -> bool:
        """Whether the copies after `step` are written to disk; copies for a switch are not."""
        return self._is_regular(step) or (self.is_extra(step) and self.moving is None)

    def can_switch(self, step: int, staleness: int) -> bool:
        """Whether a switch to another plan after `step` leaves the weights that later steps read unchanged.

        With staleness, only after a regular checkpoint: right after it, calls read the newest weights in any case.

        >>> [step for step in range(7) if StepRange(num_steps=6, every=2).can_switch(step, staleness=1)]
        [2, 4]
        """
        return step < self.num_steps and (staleness == 0 or self._is_regular(step))

    def is_drained(self, step: int, staleness: int) -> bool:
        """Whether a checkpoint after `step` leaves the weights that later steps read unchanged.

        With staleness, only a regular checkpoint does, if the run has regular checkpoints; see `drained`.
        """
        return staleness == 0 or self.every is None or self._is_regular(step)

    def _is_regular(self, step: int) -> bool:
        if self.every is None or not self.finished < step <= self.num_steps:
            return False
        return step % self.every == 0 or step == self.num_steps

    def drained(self, step: int) -> int:
        """Return the oldest weight version that a call at `step` may read: the last checkpoint's version.

        So the rest of the run can start from the written state alone. This holds under staleness too: right after a
        checkpoint, a call reads the newest weights.

        >>> [StepRange(num_steps=5, every=2).drained(step) for step in (1, 2, 3, 4, 5)]
        [0, 0, 2, 2, 4]
        """
        return max(self.finished, 0 if self.every is None else (step - 1) // self.every * self.every)


def add_checkpoints(
    builder: GraphBuilder, graph: DataflowGraph, plan: ExecutionPlan, steps: StepRange, unrolled: Iterable[int]
) -> None:
    """Insert the checkpoint nodes of the unrolled steps; each copy waits until the previous copy is on disk.

    A train_step's dependency on the copy of the weights that it overwrites is added with the other readers.
    """
    trained = [instance for model in graph.models if (instance := stored_instance(graph, plan, model.role)) is not None]
    names = labels(graph, plan)
    before: tuple[Dependency, ...] = ()
    for step in filter(steps.is_checkpointed, unrolled) if trained else ():
        copied = [one for one in trained if steps.is_committed(step) or one.role in (steps.moving or ())]
        copies = {instance: _checkpoint(graph, instance, names[instance], step) for instance in copied}
        for position, node in enumerate(copies.values()):
            builder.add(node, checkpoint_of(step, position))
            builder.wait(node.id, *before)
            for absent in [made for made in node.depends_on if made not in builder.nodes]:
                builder.replace_dependency(node.id, absent)  # it ended long before
        if not steps.is_committed(step):
            continue
        commit = _commit(builder, graph, step, copies)
        builder.add(commit, commit_of(step))
        before = (Dependency(commit.id, "memory", "host memory of the last copy"),)


def stateful_calls(graph: DataflowGraph) -> tuple[Call, ...]:
    """Return the computations that carry state from step to step."""
    return tuple(call for call in graph if call.stateful)


def _checkpoint(graph: DataflowGraph, instance: ModelInstance, name: str, step: int) -> Node:
    role, number = instance.role, graph.version_after(instance.role, step)
    follows, version = graph.model(role).follows is not None, f"{role} v{number}"
    made = follow_id(name, number) if follows else train_run_id(graph, role, number)
    return Node(
        id=f"checkpoint.{role}@{step}",
        step=step,
        meshes=(instance.mesh,),
        dependencies=(Dependency(made, "version", version),),
        reason=f"a run that ends after step {step} goes on from {version}{'' if follows else ' and its optimizer'}.",
        work=Checkpoint(instance, number),
    )


def _commit(builder: GraphBuilder, graph: DataflowGraph, step: int, copies: Mapping[ModelInstance, Node]) -> Node:
    """Return the node, on the devices whose ranks hold a copy."""
    copied = (Dependency(node.id, "version", f"{copy.role} v{node.reads}") for copy, node in copies.items())
    states = {
        latest: Dependency(latest, "state", call.name)
        for call in stateful_calls(graph)
        if (latest := run_id(call.name, latest_run(call, step))) in builder.nodes
    }
    evaluations = (
        Dependency(run, "order", "evaluation of the step")
        for call in graph
        if call.every is not None and (run := run_id(call.name, step)) in builder.nodes and run not in states
    )
    return Node(
        id=f"commit@{step}",
        step=step,
        meshes=union(instance.mesh for instance in copies),
        dependencies=(*copied, *states.values(), *evaluations),
        reason="the copies are written in the background; small files and a rename make them the newest checkpoint.",
        work=Commit(),
    )
