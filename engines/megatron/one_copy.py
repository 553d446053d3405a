"""Moves host tensors to a device in a single copy, because each copy waits until the device has done its queued
work.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNED = 16  # bytes: a multiple of every format's size


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of any formats and shapes from the host to a device; for CPU they are returned unchanged.

    >>> whole, half = to_device([torch.arange(3), torch.tensor([0.5])], torch.device("cpu"))
    >>> whole.tolist(), half.tolist()
    ([0, 1, 2], [0.5])
    """
    if device.type == "cpu" or not tensors:
        return list(tensors)
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    padded = [F.pad(each, (0, -len(each) % ALIGNED)) for each in flat]
    parts = torch.split(torch.cat(padded).to(device), [len(each) for each in padded])
    return [
        part[: len(each)].view(tensor.dtype).view(tensor.shape)
        for part, each, tensor in zip(parts, flat, tensors, strict=True)
    ]
