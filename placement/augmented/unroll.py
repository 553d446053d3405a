"""Unroll an iteration into all runs of its calls: steps, weight versions, and the dependencies of each run.

Steps count from 1. Version v of a role is its weights after v steps, so step s starts with version s - 1. An evaluation
after s steps belongs to step s and reads version s; step 0 has nothing but the evaluation before training.

This is independent of the plan: `augment` adds moves of weights and data, and the waits before weights are overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.node import Dependency
from prefect_rlhf.placement.graph import Call, DataflowGraph, VersionEdge


@dataclass(frozen=True, slots=True)
class CallRun:
    """A call's run: its step, and the weight version that it reads (None without a model)."""

    call: Call
    step: int
    reads: int | None
    dependencies: tuple[Dependency, ...]

    @property
    def id(self) -> str:
        return run_id(self.call.name, self.step)


def run_id(call: str, step: int) -> str:
    """Return the id of a call's run.

    >>> run_id("actor_generate", 3)
    'actor_generate@3'
    """
    return f"{call}@{step}"


def train_run_id(graph: DataflowGraph, role: str, version: int) -> str:
    """Return the id of the train_step that writes a version (1 or more) of a trained role."""
    trainer = graph.trained_by(role)
    assert trainer is not None  # only asked of trained roles
    return run_id(trainer.name, version)


def follow_id(name: str, version: int) -> str:
    """Return the id of the node that writes a follower's version (1 or more); `name` is its instance's.

    >>> follow_id("ref.megatron", 2)
    'follow.ref.megatron@2'
    """
    return f"follow.{name}@{version}"


def unroll(
    graph: DataflowGraph,
    num_steps: int,
    finished: int = 0,
    oldest: Callable[[int], int] | None = None,
    only: Iterable[int] | None = None,
) -> tuple[CallRun, ...]:
    """Return every run of every call, step by step; evaluation also runs before training and after the last step.

    A run that resumes after `finished` steps has only the later runs, without dependencies on earlier steps. `oldest`
    returns the lowest weight version that a step's calls read under any staleness. With `only`, return the runs of
    these steps.
    """
    edges = {(edge.target, edge.source): edge for edge in graph.version_edges()}
    return tuple(
        _run(graph, edges, call, step, finished, oldest(step) if oldest else 0)
        for step in (range(num_steps + 1) if only is None else only)
        if _is_left(step, finished)
        for call in graph
        if runs_at(call, step, num_steps)
    )


def runs_at(call: Call, step: int, num_steps: int) -> bool:
    """Whether `call` runs at `step`, 0 to `num_steps`, of a training run of `num_steps` steps."""
    if call.every is None:
        return 0 < step <= num_steps
    return step == num_steps or step % call.every == 0


def latest_run(call: Call, step: int) -> int:
    """Return the last step, up to `step`, that runs `call`, except for evaluation after the last train_step."""
    every = call.every or 1
    return step // every * every


def version_read(edge: VersionEdge, step: int) -> int:
    """Return the weight version that the edge's target reads at `step`: the number of train_steps before it.

    >>> [version_read(VersionEdge("train", "generate", "actor", lag=2), step) for step in (1, 2, 3, 4)]
    [0, 0, 1, 2]
    """
    return max(0, step - edge.lag)


def _is_left(step: int, finished: int) -> bool:
    """Whether a step is left to a run that resumes after `finished` steps."""
    return step > finished or step == finished == 0


def _run(
    graph: DataflowGraph, edges: dict[tuple[str, str], VersionEdge], call: Call, step: int, finished: int, oldest: int
) -> CallRun:
    producers = graph.reads_of(call.name).items()
    dependencies = [Dependency(run_id(producer, step), "data", ", ".join(keys)) for producer, keys in producers]
    reads = None if call.role is None else 0
    trainer = graph.trained_by(call.role) if call.role else None
    if trainer is not None:
        reads = max(oldest, version_read(edges[call.name, trainer.name], step))
        if reads > finished:
            dependencies.append(Dependency(run_id(trainer.name, reads), "version", f"{call.role} v{reads}"))
    elif call.role and graph.model(call.role).follows:  # the plan decides which nodes make its versions
        reads = graph.version_after(call.role, max(oldest, step - graph.follow_lag(call)))
    if call.stateful:
        before = latest_run(call, step - 1)  # evaluation runs once more after the last step, between two multiples
        if before >= (0 if call.every else 1) and _is_left(before, finished):
            dependencies.append(Dependency(run_id(call.name, before), "state", call.name))
    return CallRun(call, step, reads, tuple(dependencies))
