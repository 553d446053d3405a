"""The Llama family's layer pieces that Megatron leaves slow or unfused without CUDA, as drop-ins for its layer spec.

On CUDA they are torch's own fused kernels. On CPU each is one autograd function with few passes over memory, which
there costs more than the arithmetic.

Shapes: S tokens of a row, B rows, H hidden, F feed-forward, G key-value heads of this rank, Q query heads for each of
them, D head dimension.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor

from prefect_rlhf.engines.megatron.cpu import kernels as cpu_kernels
from prefect_rlhf.engines.megatron.key_value_cache import CachedPass
from prefect_rlhf.engines.megatron.packing import Packing


class Rotary:
    """Cosines and sines of the rotary embedding, made once for all layers. Rows start at position 0."""

    def __init__(self, theta: float, head_dim: int) -> None:
        self._frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self._made: tuple[Tensor, Tensor] | None = None

    def tables(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [S, D / 2], in the format and on the device of `like`."""
        if self._made is None or self._made[0].shape[0] < length:
            angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
            self._made = (angles.cos().to(like), angles.sin().to(like))
        return self._made[0][:length], self._made[1][:length]


class RotaryAttention(SelfAttention):  # type: ignore[misc]
    """Causal self-attention straight from the fused projection. Rows are right-padded, so no mask is needed."""

    def __init__(self, *args: Any, rotary: Rotary, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rotary = rotary

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Packing | CachedPass, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S, B, H] or packed [N, 1, H] to the same shape. Megatron hands the packing through under its own name."""
        qkv, _ = self.linear_qkv(hidden_states)
        qkv_NGXD = qkv.view(-1, self.num_query_groups_per_partition, *self._group_shape)
        if isinstance(packed_seq_params, Packing):
            mixed = self._attend(qkv_NGXD, packed_seq_params)
        else:
            mixed = packed_seq_params.attend(self.layer_number, qkv_NGXD)
        return cast(tuple[Tensor, Tensor | None], self.linear_proj(mixed.view(*hidden_states.shape[:2], -1)))

    @property
    def _group_shape(self) -> tuple[int, int]:
        """(X, D): queries, key and value of one group, and the size of each."""
        queries = self.num_attention_heads_per_partition // self.num_query_groups_per_partition
        return queries + 2, self.hidden_size_per_attention_head

    def _attend(self, qkv_NGXD: Tensor, packing: Packing) -> Tensor:
        """[N, W]: without a cache, for a pass whose gradient may be wanted."""
        qkv_SBW = packing.spread(qkv_NGXD.flatten(1))
        cos, sin = self.rotary.tables(qkv_SBW.shape[0], qkv_SBW)
        mixed = attend(qkv_SBW.view(*qkv_SBW.shape[:2], *qkv_NGXD.shape[1:]), cos, sin)
        return packing.pack(mixed.flatten(2))


class NoCoreAttention(torch.nn.Module):
    """Stands where Megatron builds its own core attention, which RotaryAttention does not use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class GatedSilu(torch.nn.Module):
    """Activation of the feed-forward layer: silu(gate) * up, [S, B, 2F] to [S, B, F]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()

    def forward(self, both: Tensor) -> Tensor:
        """`both` holds gate first, then up."""
        if not both.is_cuda:
            return cpu_kernels.gated_silu(both)
        gate, up = both.chunk(2, dim=-1)
        return F.silu(gate) * up


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm, built the way Megatron's layer spec builds norms."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        if x.is_cuda:
            return super().forward(x)
        assert self.eps is not None
        return cpu_kernels.rms_norm(x, self.weight, self.eps)


def attend(qkv_SBGXD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """Rotate queries and keys, attend causally; return [S, B, G, Q, D].

    Axis X holds, for each key-value head, its Q query heads, the key and the value, as Megatron's projection does.
    """
    if not qkv_SBGXD.is_cuda:
        return cpu_kernels.attend(qkv_SBGXD, cos_SD, sin_SD)
    length, num_rows, groups, width, dim = qkv_SBGXD.shape
    first, second = qkv_SBGXD[..., :-1, :].chunk(2, dim=-1)
    cos, sin = (table[:, None, None, None] for table in (cos_SD, sin_SD))
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads = (rotated[..., :-1, :], rotated[..., -1:, :], qkv_SBGXD[..., -1:, :])
    query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in heads)
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return mixed.permute(2, 0, 1, 3).reshape(length, num_rows, groups, width - 2, dim)
