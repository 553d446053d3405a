"""Copies of key-value heads on further tensor-parallel ranks: their gradients add up, and count once in the norm.

Such a rank has a single head's keys and values, below its own queries in the fused weight and in its bias; an adapter
has a B for each. The copies begin equal and take the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.megatron.adapters.linear import AdaptedColumnLinear
from prefect_rlhf.engines.megatron.core_versions import change_norm_gradients
from prefect_rlhf.engines.megatron.groups import Groups, group_of_tp_ranks
from prefect_rlhf.engines.megatron.model import Transformer
from prefect_rlhf.placement.models.model import TransformerShape


@dataclass(frozen=True, slots=True)
class KeyValueCopies:
    """The trained tensors of this rank's layers with keys and values in their last rows, each with the number of these
    rows, and the ranks that have copies of its key-value head.
    """

    group: dist.ProcessGroup
    copied: tuple[tuple[Any, int], ...]

    @classmethod
    def of(cls, model: Transformer, shape: TransformerShape, groups: Groups) -> KeyValueCopies | None:
        """Return the copies; None if no other rank has this rank's heads. Every rank of the mesh must call it."""
        count = groups.strategy.tp // shape.num_kv_heads
        if count < 2:
            return None
        first = groups.coordinate.tp // count * count
        layers = [layer.self_attention.linear_qkv for layer in model.decoder.layers]
        fused = [(tensor, 2 * shape.head_dim) for layer in layers for tensor in (layer.weight, layer.bias)]
        adapted = (layer.lora_B.items() for layer in layers if isinstance(layer, AdaptedColumnLinear))
        fused += [(b, shape.head_dim) for each in adapted for name, b in each if name != "q_proj"]
        copied = tuple((tensor, rows) for tensor, rows in fused if tensor is not None and tensor.requires_grad)
        return cls(group_of_tp_ranks(groups, first, first + count), copied)

    def sum_gradients(self) -> None:
        """Give every copy the sum of all copies' gradients."""
        # Each rank's queries attend to its copy, so each copy has only a part of the head's gradient. The sum over
        # copies is the head's gradient, and equal sums keep the copies equal after the optimizer step. All layers
        # travel in a single message, because a message's latency outweighs its few bytes.
        parts = [tensor.main_grad[-rows:].view(-1) for tensor, rows in self.copied]
        if not parts:
            return
        flat = torch.cat(parts)
        dist.all_reduce(flat, group=self.group)
        for part, summed in zip(parts, torch.split(flat, [len(part) for part in parts]), strict=True):
            part.copy_(summed)

    def count_once(self, optimizer: Any) -> None:
        """Make a Megatron DistributedOptimizer count only the first copy in the gradient's norm."""
        if self.group.rank() > 0:
            change_norm_gradients(optimizer, partial(self._counted, optimizer))

    def _counted(self, optimizer: Any, gradients: list[Tensor]) -> list[Tensor]:
        """Return the gradients of the norm, cut off before keys and values; each is a flat range of a weight's."""
        ends: dict[int, int] = {}
        for tensor, rows in self.copied:
            if tensor in optimizer.model_param_group_index_map:
                group, place = optimizer.model_param_group_index_map[tensor]
                # The distributed optimizer shards each weight as a flat range, which may begin or end inside the fused
                # queries, keys and values. Keys and values are the last rows of the weight, so the part to count is the
                # range up to their start.
                main = optimizer.optimizer.param_groups[group]["params"][place]
                start = optimizer._get_model_param_range_map(tensor)["param"].start
                queries = tensor.numel() // tensor.shape[0] * (tensor.shape[0] - rows)
                ends[id(main.grad)] = max(0, queries - start)
        return [gradient[: ends.get(id(gradient))] for gradient in gradients]
