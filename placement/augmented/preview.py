"""The first steps of a run: enough to see what repeats, however long the run is."""

from __future__ import annotations

from math import lcm

from prefect_rlhf.placement.augmented.augment import unrolled_nodes
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.checkpointing import StepRange
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.unroll import latest_run
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan

PERIODS = 3  # how often the whole pattern of evaluation and checkpoints is seen
LEAST_STEPS, MOST_STEPS = 24, 64


def preview(
    graph: DataflowGraph, plan: ExecutionPlan, num_steps: int, finished: int = 0, checkpoint_every: int | None = None
) -> AugmentedGraph:
    """Return the graph of the first steps of a run of `num_steps`; see `augment`. A short run is complete.

    In a longer run, the last steps shown may lack dependencies on the following steps. Raises GraphError if the plan
    makes nodes wait for each other.
    """
    steps = StepRange(num_steps, finished, checkpoint_every)
    follows = [model.follows.every for model in graph.models if model.follows]
    period = lcm(checkpoint_every or 1, *follows, *(call.every or 1 for call in graph))
    shown = steps.all()[: min(max(LEAST_STEPS, PERIODS * period), MOST_STEPS) + 1]
    return AugmentedGraph(graph, plan, num_steps, unrolled_nodes(graph, plan, steps, shown), finished)


def distant_nodes(previewed: AugmentedGraph, checkpoint_every: int | None = None) -> tuple[Node, ...]:
    """Return nodes of later steps whose kind does not occur in the preview.

    They are the first run of each evaluation, the first checkpoint, and the first follow of each follower.
    """
    there = {node.call.name if node.call else node.kind for node in previewed}
    steps = StepRange(previewed.num_steps, previewed.finished, checkpoint_every)
    distant = {
        min(latest_run(call, steps.finished) + call.every, steps.num_steps)
        for call in previewed.graph
        if call.every is not None and call.name not in there
    }
    has_steps = steps.finished < steps.num_steps  # else exports are all that is left
    if checkpoint_every is not None and "commit" not in there and has_steps:
        distant.add(min((steps.finished // checkpoint_every + 1) * checkpoint_every, steps.num_steps))
    for follows in (model.follows for model in previewed.graph.models if model.follows and "follow" not in there):
        first = (steps.finished // follows.every + 1) * follows.every
        distant |= {first} if first <= steps.num_steps else set()
    return unrolled_nodes(previewed.graph, previewed.plan, steps, sorted(distant)) if distant else ()
