"""A loss on a batch as a train_step adds it up: sums of loss and metrics, and the weight that they are divided by."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from prefect_rlhf.engines.losses.mean_over import row_parts
from prefect_rlhf.engines.rows import Columns
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import Operator


@dataclass(frozen=True)
class LossSums:
    """`metrics` are sums too, divided by the same weight unless they are of other units."""

    total: Tensor
    weight: Tensor
    metrics: Mapping[str, Tensor]


def loss_sums(operator: Operator, output: Tensor, batch: Mapping[str, Tensor], algo: Settings, **on) -> LossSums:
    """Run a loss on rows. Rows out of the loss are out of the mask, as a rank makes it; without a mask all count."""
    (term,) = operator(algo).on("rows", **on).terms
    mask = batch.get("mask", torch.ones(len(output), 1))
    if "row_weights" in batch:
        mask = mask * batch["row_weights"][:, None]
    seen = Columns({**batch, "mask": mask})
    parts = row_parts(term.mean_over, seen, operator.rows_per_item)
    made = operator.function(parts.counted(output), seen, algo)
    unit, total = parts.loss_sum(made.values)
    metrics = {name: parts.metric_sum(name, values)[1] for name, values in made.metrics.items()}
    return LossSums(total, parts.weights()[unit].to(total.dtype), metrics)
