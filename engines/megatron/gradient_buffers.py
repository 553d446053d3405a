"""Megatron's data parallelism for one model: gradients in flat buffers, summed over replicas once per mini-batch.

Each replica ends with the sum of its share of the gradients, updates its share of the weights, and gathers the others'.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from prefect_rlhf.engines.megatron.gradients import add_blockwise
from prefect_rlhf.engines.megatron.groups import Groups
from prefect_rlhf.engines.megatron.model import Transformer

MESSAGE_ELEMENTS = 1 << 22  # of one message: small buffers are reused, large ones would be mapped anew each time


class GradientBuffers(DistributedDataParallel):  # type: ignore[misc]
    """DistributedDataParallel with its collectives replaced by messages where gloo carries them.

    Torch's reduce_scatter and all_gather over gloo copy the whole buffer into fresh memory first, which takes longer
    than the sending; for a group of one they do nothing else.
    """

    def finish_grad_sync(self, *args: Any, **options: Any) -> None:
        """Sum gradients over replicas; each keeps its share."""
        if self.buffers[0].grad_data.is_cuda:
            super().finish_grad_sync(*args, **options)
            return
        for buffer in self.buffers:
            sum_shares(buffer.grad_data, buffer.param_dtype, self.dp_group)

    def start_param_sync(self, *args: Any, **options: Any) -> None:
        """Gather the shares of updated weights."""
        if self.buffers[0].grad_data.is_cuda:
            super().start_param_sync(*args, **options)
            return
        for buffer in self.buffers:
            gather_shares(buffer.param_data, self.dp_group)


def with_gradient_buffers(model: Transformer, groups: Groups) -> GradientBuffers:
    """Wrap a model so that its gradients gather in float32 buffers."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped = GradientBuffers(model.config, config, model, pg_collection=groups.collection)
    model.config.finalize_model_grads_func = _sum_gradients
    return wrapped


def sum_shares(flat: Tensor, wire: torch.dtype, group: dist.ProcessGroup) -> None:
    """Add to this rank's share of `flat` (one of equal consecutive parts) what the other ranks hold of it.

    Values travel as `wire`: gradients of bfloat16 products lose nothing by it.
    """
    for mine, outgoing, target, source in _rounds(flat, group):
        for kept, sent in zip(mine.split(MESSAGE_ELEMENTS), outgoing.split(MESSAGE_ELEMENTS), strict=True):
            incoming = torch.empty_like(kept, dtype=wire)
            _swap(sent.to(wire), target, incoming, source, group)
            add_blockwise(kept, incoming)


def gather_shares(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `flat` with every rank's own share."""
    shares = flat.chunk(group.size())
    for mine, _, target, source in _rounds(flat, group):
        _swap(mine, target, shares[source], source, group)


def _rounds(flat: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Who exchanges with whom: this rank's share, the target's share, target and source; one round per other rank."""
    shares, mine, size = flat.chunk(group.size()), group.rank(), group.size()
    for distance in range(1, size):
        target = (mine + distance) % size
        yield shares[mine], shares[target], target, (mine - distance) % size


def _swap(outgoing: Tensor, target: int, incoming: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Send to one rank of the group while receiving from another."""
    sending = dist.isend(outgoing, group=group, group_dst=target)
    receiving = dist.irecv(incoming, group=group, group_src=source)
    for request in (sending, receiving):
        assert request is not None  # both ranks are in the group
        request.wait()


def _sum_gradients(model: list[Any], _: Tensor | None, **options: Any) -> None:
    """Megatron would divide by a whole number of tokens here; ours is divided by the loss's weight, in the step."""
    finalize_model_grads(model, None, **options)
