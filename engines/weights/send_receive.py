"""A round of messages between pairs of ranks."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor


def send_receive(outgoing: Mapping[int, Sequence[Tensor]], incoming: Mapping[int, Sequence[Tensor]]) -> None:
    """Send to and receive from peers, by rank in the world; return when everything has arrived.

    Every operation is posted before any wait, and a pair's operations in the given order, so both ends need only agree
    on the order of their own messages. Empty tensors are not sent.
    """
    operations = [
        dist.P2POp(post, tensor, peer)
        for post, messages in ((dist.isend, outgoing), (dist.irecv, incoming))
        for peer in sorted(messages)
        for tensor in messages[peer]
        if tensor.numel()
    ]
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
