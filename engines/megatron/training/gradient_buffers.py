"""Megatron's data parallelism: gradients in flat buffers, summed over replicas once per mini-batch.

Each replica ends with the sum of its share of the gradients, updates its share of the weights, and gathers the others'.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from prefect_rlhf.engines.megatron.core_versions import buffer_layout
from prefect_rlhf.engines.megatron.cpu.gradient_buffers import GlooGradientBuffers
from prefect_rlhf.engines.megatron.groups import Groups
from prefect_rlhf.engines.megatron.model import Transformer
from prefect_rlhf.engines.megatron.training.key_value_copies import KeyValueCopies


def with_gradient_buffers(model: Transformer, groups: Groups, copies: KeyValueCopies | None) -> DistributedDataParallel:
    """Wrap a model so that gradients are collected in float32 buffers."""
    buffers = DistributedDataParallel if torch.cuda.is_available() else GlooGradientBuffers
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model.config.finalize_model_grads_func = partial(sum_gradients, copies=copies)
    layout = buffer_layout(list(model.parameters()), config, groups.dp.size())
    return buffers(model.config, config, model, pg_collection=groups.collection, **layout)


def sum_gradients(model: list[Any], _: Tensor | None = None, *, copies: KeyValueCopies | None, **options: Any) -> None:
    """Sum gradients over copies of key-value heads and over replicas, at the end of Megatron's schedule.

    Megatron would divide by a whole number of tokens here, but each micro-batch's part of the loss is divided already.
    """
    if copies is not None:
        copies.sum_gradients()
    finalize_model_grads(model, None, **options)
