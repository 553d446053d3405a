"""A run's number of steps: `epochs` becomes `steps`, and schedules end at the last optimizer step."""

from dataclasses import replace

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.flows.training.spec.run_spec import RunSpec
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.model import ModelSpec


def falling_over(graph: DataflowGraph, steps: int) -> DataflowGraph:
    """Return the graph with `decay_steps` set to the run's `steps` in each decaying optimizer that lacks it.

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
        raise InvalidInput(call.setting("warmup_steps"), spec.warmup_steps, expected)
    return replace(model, optimizer=replace(spec, decay_steps=updates))


def with_steps(spec: RunSpec, graph: DataflowGraph) -> RunSpec:
    """Convert the run's `epochs` to `steps`, rounded up; steps continue across passes.

    An epoch is a pass over the dataset that the first trained role learns from.
    """
    if spec.epochs is None:
        return spec
    call = next(call for call in graph if call.every is None and graph.trained_by(call.role or ""))
    dataset = next(data for data in graph.datasets if data.name == call.rows.dataset)
    items = call.num_rows // call.rows.rows_per_item
    steps = -(-spec.epochs * dataset.num_items // items)
    log_info(f"{spec.epochs} epochs of {dataset.num_items} {dataset.name}, {items} per step: {steps} steps")
    return replace(spec, steps=steps, epochs=None)
