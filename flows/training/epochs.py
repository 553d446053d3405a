"""How many steps so many passes over the data are."""

from __future__ import annotations

from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.training.log import log_info
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import DataflowGraph


def with_steps(options: RunOptions, graph: DataflowGraph) -> RunOptions:
    """Return the options with the steps that their `epochs` take, rounded up: steps go on from one pass to the next.

    That is of the dataset whose rows the first trained role learns from. Raises InvalidInput where `steps` says
    something, too.
    """
    if options.epochs is None:
        return options
    default = RunOptions.model_fields["steps"].default
    if options.steps != default:
        raise InvalidInput("steps", options.steps, f"{default}, its default, where epochs says how many there are")
    call = next(call for call in graph if call.every is None and graph.trained_by(call.role or ""))
    dataset = next(one for one in graph.datasets if one.name == call.rows.dataset)
    items = call.num_rows // call.rows.rows_per_item
    steps = -(-options.epochs * dataset.num_items // items)
    log_info(f"{options.epochs} epochs of {dataset.num_items} {dataset.name}, {items} in a step: {steps} steps")
    return options.model_copy(update={"steps": steps})
