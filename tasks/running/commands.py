"""What the controller tells the ranks of a node: its commands, made from the graph and the rows of its step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from prefect_rlhf.engines.commands import CallCommand
from prefect_rlhf.engines.engine import SamplingSettings, TrainSettings
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.tasks.data.row_order import row_ids
from prefect_rlhf.tasks.operations import Bound
from prefect_rlhf.tasks.running.step_rows import StepRows
from prefect_rlhf.tasks.running.training_run import TrainingRun
from prefect_rlhf.tasks.settings import Sampling


def call_commands(run: TrainingRun, node: Node, known: StepRows) -> dict[int, CallCommand]:
    """What each rank of a call is told: the same call, each with its replica's rows and its stage's keys."""
    call, placement = node.call, node.placement
    assert call is not None and placement is not None  # every call node has both
    ids, frees = dataset_rows(run, call, node.step), known.take_frees(node)
    shared = {
        "step": node.step,
        "call": call,
        "instance": node.instance,
        "seed": run.seed,
        "run_dir": run.run_dir,
        "tokenizer": run.tokenizer,
        "micro_batches": placement.micro_batches,
        "reads": node.reads,
        "writes": node.writes,
        "versions": known.versions(node),
        **operation_fields(call, placement.micro_batches),
    }
    lengths = known.lengths_for(call, node.step)
    orders: dict[int, CallCommand] = {}
    for device, need in known.needs[call.name].items():
        rank, rows = run.rank(device), need.share.rows(known.lengths(node.step))
        orders[rank] = order = CallCommand(
            **shared,
            rows=rows,
            row_ids=tuple(ids[row] for row in rows),
            keys=need.keys,
            lengths=() if lengths is None else tuple(lengths[row] for row in rows),
            frees=frees.get(rank, ()),
        )
        if order.train is not None:
            sizes = need.share.mini_batch_sizes(call.mini_batches, known.lengths(node.step))
            orders[rank] = replace(order, train=replace(order.train, mini_batch_rows=sizes))
    return orders


@lru_cache(maxsize=64)  # the same in every step
def operation_fields(call: Call, micro_batches: int) -> Mapping[str, Any]:
    """The fields of a CallCommand that say what to run, from the call's operation."""
    if call.kind == "generate":
        sampling = SamplingSettings(**Sampling.model_validate_json(call.operation.settings).model_dump())
        return {"sampling": sampling, "samples_per_prompt": call.samples_per_prompt}
    if call.kind == "inference":
        return {"output": call.operation.name, "temperature": call.temperature}
    bound = Bound(call.operation)
    if call.kind == "compute":
        return {"function": bound}
    operator = bound.operator
    train = TrainSettings(
        output=operator.output,
        mini_batches=call.mini_batches,
        micro_batches=micro_batches,
        epochs=call.epochs,
        temperature=call.temperature,
        rows_per_item=operator.rows_per_item,
    )
    return {"function": bound, "train": train}


def dataset_rows(run: TrainingRun, call: Call, step: int) -> tuple[int, ...]:
    """The dataset's row number behind each of the call's rows at `step`.

    An evaluation call takes the dataset's first items, the same every time; other calls the seeded order's next ones.
    """
    graph = run.augmented.graph
    dataset = next(dataset for dataset in graph.datasets if dataset.name == call.rows_from)
    per_item = dataset.rows_per_item * samples_per_item(graph.calls, call)
    num_items = call.num_rows // per_item
    items = range(num_items) if call.every else row_ids(step, num_items, run.seed, dataset.num_items)
    return tuple(
        item * dataset.rows_per_item + (row % dataset.rows_per_item) for item in items for row in range(per_item)
    )


def samples_per_item(calls: Sequence[Call], call: Call) -> int:
    """How many rows of `call` come from one dataset row: the samples per prompt of the generate they stem from."""
    if call.kind == "generate":
        return call.samples_per_prompt
    by_name = {made.name: made for made in calls}
    sources = [by_name[port.source] for port in call.inputs if port.source in by_name]
    return samples_per_item(calls, sources[0]) if sources else 1
