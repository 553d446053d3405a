"""Default for `decay_steps`: a learning rate schedule ends at the run's last optimizer step."""

from dataclasses import replace

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.model import ModelSpec


def falling_over(graph: DataflowGraph, steps: int) -> DataflowGraph:
    """Return the graph with `decay_steps` set for all of a run's `steps` in each decaying optimizer that lacks it.

    Raises InvalidInput if the warm-up leaves no step for the decay.
    """
    models = tuple(_falling_over(model, graph, steps) for model in graph.models)
    return graph if models == graph.models else replace(graph, models=models)


def _falling_over(model: ModelSpec, graph: DataflowGraph, steps: int) -> ModelSpec:
    spec, call = model.optimizer, graph.trained_by(model.role)
    if spec is None or call is None or spec.schedule == "constant" or spec.decay_steps is not None or not steps:
        return model
    updates = steps * call.epochs * call.mini_batches
    if spec.warmup_steps >= updates:
        expected = f"fewer than the {updates} optimizer steps of this run: its rate decays after them"
        raise InvalidInput(f"warmup_steps of the {model.role}'s optimizer", spec.warmup_steps, expected)
    return replace(model, optimizer=replace(spec, decay_steps=updates))
