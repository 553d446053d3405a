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

from prefect_rlhf.engines.megatron.gradients import add_blockwise, mark_stale, take_stale
from prefect_rlhf.engines.megatron.groups import Groups
from prefect_rlhf.engines.megatron.model import Transformer

MESSAGE_ELEMENTS = 1 << 22  # of one message: small buffers are reused, large ones would be mapped anew each time


class GradientBuffers(DistributedDataParallel):  # type: ignore[misc]
    """DistributedDataParallel with its collectives replaced by messages where gloo carries them.

    Torch's reduce_scatter and all_gather over gloo copy the whole buffer into fresh memory first, which takes longer
    than the sending; for a group of one they do nothing else.
    """

    def zero_grad_buffer(self) -> None:
        """Forget the gradients of the step before."""
        if self.buffers[0].grad_data.is_cuda:
            super().zero_grad_buffer()
            return
        for group in self.bucket_groups:
            group.reset()
        for parameter in self.params_with_grad:
            parameter.grad_added_to_main_grad = False
            if parameter.dim() == 2 and parameter.shape[0] > 1:  # linear layers, embedding, vocabulary: see `gradients`
                mark_stale(parameter.main_grad)
            else:
                parameter.main_grad.zero_()

    def finish_grad_sync(self, *args: Any, **options: Any) -> None:
        """Sum gradients over replicas; each keeps its share."""
        if self.buffers[0].grad_data.is_cuda:
            super().finish_grad_sync(*args, **options)
            return
        for parameter in self.params_with_grad:
            if take_stale(parameter.main_grad):
                parameter.main_grad.zero_()  # no gradient came
        for bucket in self._buckets():
            sum_shares(bucket.grad_data, bucket.param_data.dtype, self.dp_group)

    def start_param_sync(self, *args: Any, **options: Any) -> None:
        """Gather the shares of updated weights."""
        if self.buffers[0].grad_data.is_cuda:
            super().start_param_sync(*args, **options)
            return
        for bucket in self._buckets():
            gather_shares(bucket.param_data, self.dp_group)

    def _buckets(self) -> list[Any]:
        """What is shared out over replicas, each by itself: an embedding tied over a pipeline has its own bucket."""
        return [bucket for buffer in self.buffers for bucket in buffer.buckets]


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
        for kept, sent in zip(
            torch.split(mine, MESSAGE_ELEMENTS), torch.split(outgoing, MESSAGE_ELEMENTS), strict=True
        ):
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
