"""Gradient buffers on CPU: gradients are summed over replicas by messages through gloo, not by collectives.

Torch's reduce_scatter and all_gather over gloo first copy the whole buffer into fresh memory, which takes longer than
sending it; for a group of a single rank they only make that copy.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from prefect_rlhf.engines.megatron.gradients import add_blockwise, mark_stale, take_stale

MESSAGE_ELEMENTS = 1 << 22  # of a message: the allocator reuses small buffers, but maps large buffers anew each time


class GlooGradientBuffers(DistributedDataParallel):  # type: ignore[misc]
    """Megatron's DistributedDataParallel on CPU ranks."""

    def zero_grad_buffer(self) -> None:
        """Discard the gradients of the previous step."""
        for group in self.bucket_groups:
            group.reset()
        for parameter in self.params_with_grad:
            parameter.grad_added_to_main_grad = False
            by_sink = parameter.dim() == 2 and parameter.shape[0] > 1 and not hasattr(parameter, "is_adapter")
            if by_sink:  # linear layers, embedding, vocabulary: see `gradients`
                mark_stale(parameter.main_grad)
            else:
                parameter.main_grad.zero_()

    def finish_grad_sync(self, *_: Any, **__: Any) -> None:
        """Sum gradients over replicas; each replica keeps its share."""
        for parameter in self.params_with_grad:
            if take_stale(parameter.main_grad):
                parameter.main_grad.zero_()  # no gradient in this step
        for bucket in self._buckets():
            sum_shares(bucket.grad_data, bucket.param_data.dtype, self.dp_group)

    def start_param_sync(self, *_: Any, **__: Any) -> None:
        """Gather the shares of updated weights."""
        for bucket in self._buckets():
            gather_shares(bucket.param_data, self.dp_group)

    def _buckets(self) -> list[Any]:
        """Return the parts that replicas divide: an embedding tied over a pipeline has its own bucket."""
        return [bucket for buffer in self.buffers for bucket in buffer.buckets]


def sum_shares(flat: Tensor, wire: torch.dtype, group: dist.ProcessGroup) -> None:
    """Add the other ranks' values to this rank's share of `flat` (equal consecutive parts, one per rank).

    Values are sent as `wire`: gradients of bfloat16 products lose no precision, others are rounded.
    """
    for own, outgoing, target, source in _rounds(flat, group):
        parts = (torch.split(share, MESSAGE_ELEMENTS) for share in (own, outgoing))
        for kept, sent in zip(*parts, strict=True):
            incoming = torch.empty_like(kept, dtype=wire)
            _send_receive(sent.to(wire), target, incoming, source, group)
            add_blockwise(kept, incoming)


def gather_shares(flat: Tensor, group: dist.ProcessGroup) -> None:
    """Fill `flat` with every rank's own share."""
    shares = flat.chunk(group.size())
    for own, _, target, source in _rounds(flat, group):
        _send_receive(own, target, shares[source], source, group)


def _rounds(flat: Tensor, group: dist.ProcessGroup) -> Iterator[tuple[Tensor, Tensor, int, int]]:
    """Own share, the target's share, target and source of each round; there is a round per other rank."""
    shares, rank, size = flat.chunk(group.size()), group.rank(), group.size()
    for distance in range(1, size):
        target = (rank + distance) % size
        yield shares[rank], shares[target], target, (rank - distance) % size


def _send_receive(outgoing: Tensor, target: int, incoming: Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Send to a rank of the group while receiving from another."""
    sending = dist.isend(outgoing, group=group, group_dst=target)
    receiving = dist.irecv(incoming, group=group, group_src=source)
    for request in (sending, receiving):
        assert request is not None  # both ranks are in the group
        request.wait()
