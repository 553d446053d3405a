"""Convert `epochs` to `steps`."""

from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.placement.errors import NotUsed
from prefect_rlhf.placement.graph import DataflowGraph


def with_steps(options: RunOptions, graph: DataflowGraph) -> RunOptions:
    """Return the options with the `steps` that their `epochs` take, rounded up; steps continue across passes.

    An epoch is a pass over the dataset whose rows the first trained role learns from. Raises InvalidInput if `steps` is
    set too.
    """
    if options.epochs is None:
        return options
    default = RunOptions.model_fields["steps"].default
    if options.steps != default:
        raise NotUsed("steps", options.steps, "epochs sets the number of steps", "remove epochs")
    call = next(call for call in graph if call.every is None and graph.trained_by(call.role or ""))
    dataset = next(data for data in graph.datasets if data.name == call.rows.dataset)
    items = call.num_rows // call.rows.rows_per_item
    steps = -(-options.epochs * dataset.num_items // items)
    log_info(f"{options.epochs} epochs of {dataset.num_items} {dataset.name}, {items} per step: {steps} steps")
    return options.model_copy(update={"steps": steps})
