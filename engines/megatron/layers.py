"""Pieces of dense decoder layers, as drop-ins for Megatron's layer spec.

On CUDA they use torch's own kernels, from `fused`. On CPU each is a single autograd function from `cpu.kernels`, with
few passes over memory, because memory costs more than arithmetic there.

Shapes: S tokens of a row, B rows, H hidden, F feed-forward, G key-value heads of this rank, Q query heads for each of
them, X = Q + 2 (queries, key, value), D head dimension.
"""

import math
from types import ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prefect_rlhf.engines.megatron import fused
from prefect_rlhf.engines.megatron.core_versions import let_go_of_inputs
from prefect_rlhf.engines.megatron.cpu import kernels as cpu_kernels
from prefect_rlhf.engines.megatron.key_value_cache import CachedPass
from prefect_rlhf.engines.megatron.packing import Packing
from prefect_rlhf.engines.megatron.rotary import Rotary


class RotaryAttention(SelfAttention):  # type: ignore[misc]
    """Causal self-attention straight from the fused projection. Rows are right-padded, so no mask is needed."""

    def __init__(self, *args: Any, rotary: Rotary, window: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rotary, self.window = rotary, window

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: Packing | CachedPass, **__: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Map [S, B, H] or packed [N, 1, H] to the same shape. `packed_seq_params` is Megatron's name for the
        packing.
        """
        qkv, _ = self.linear_qkv(hidden_states)
        groups, dim = self.num_query_groups_per_partition, self.hidden_size_per_attention_head
        qkv_NGXD = self._normed(qkv.view(-1, groups, self.num_attention_heads_per_partition // groups + 2, dim))
        if isinstance(packed_seq_params, Packing):
            mixed = self._attend_without_cache(qkv_NGXD, packed_seq_params)
        else:
            mixed = packed_seq_params.attend(self.layer_number, qkv_NGXD, self.rotary, self.window)
        return cast(tuple[Tensor, Tensor | None], self.linear_proj(mixed.view(*qkv.shape[:2], -1)))

    def _normed(self, qkv_NGXD: Tensor) -> Tensor:
        """Apply the norms of queries and keys, if the model has them, to copies: the projection can then be freed."""
        if not self.config.qk_layernorm:
            return qkv_NGXD
        queries, keys = qkv_NGXD[:, :, :-2].contiguous(), qkv_NGXD[:, :, -2:-1].contiguous()
        queries = self.q_layernorm(queries)
        if self.config.softmax_scale is not None:  # attention itself divides by the root of the width
            queries = queries * (self.config.softmax_scale * math.sqrt(self.hidden_size_per_attention_head))
        return torch.cat((queries, self.k_layernorm(keys), qkv_NGXD[:, :, -1:]), dim=2)

    def _attend_without_cache(self, qkv_NGXD: Tensor, packing: Packing) -> Tensor:
        """Attend in a pass that may need a gradient; return [N, G * Q * D]."""
        qkv_SBW = packing.spread(qkv_NGXD.flatten(1))
        cos, sin = self.rotary.tables(qkv_SBW.shape[0], qkv_SBW)
        mixed = causal_attention(qkv_SBW.view(*qkv_SBW.shape[:2], *qkv_NGXD.shape[1:]), cos, sin, self.window)
        return packing.pack(mixed.flatten(2))


class RecomputingLayer(TransformerLayer):  # type: ignore[misc]
    """Megatron's layer. If it recomputes, it keeps only its input, and its backward pass runs its forward again.

    Its forward draws no random numbers, so both runs give equal results.
    """

    recomputes = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        let_go_of_inputs(self)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Map [S, B, H] to the same shape, as Megatron's layer does."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return super().forward(*args, **options)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


class NoCoreAttention(torch.nn.Module):
    """A placeholder for Megatron's own core attention, which RotaryAttention does not use."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


class GatedActivation(torch.nn.Module):
    """The feed-forward layer's activation: silu(gate) * up, or gelu's; [S, B, 2F] to [S, B, F]."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self._is_silu = config.activation_func is F.silu

    def forward(self, both: Tensor) -> Tensor:
        """Apply it to `both`, which holds gate first, then up."""
        of_device = kernels(both)
        return cast(Tensor, of_device.gated_silu(both) if self._is_silu else of_device.gated_gelu(both))


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm, constructed as Megatron's layer spec does; its weight may be an offset from 1."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self._is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        weight = self.weight.float() + 1 if self._is_zero_centered else self.weight
        return cast(Tensor, kernels(x).rms_norm(x, weight, self.eps))


class NormedRowParallelLinear(RowParallelLinear):  # type: ignore[misc]
    """Megatron's linear layer at the end of attention or the feed-forward layer, followed by a norm."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.norm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map [S, B, input] to [S, B, H]."""
        made, bias = super().forward(hidden_states)
        return self.norm(made), bias


def causal_attention(qkv_SBGXD: Tensor, cos_SD: Tensor, sin_SD: Tensor, window: int | None = None) -> Tensor:
    """Apply rotary embeddings and causal attention (only within `window`, if given); return [S, B, G, Q, D].

    Axis X holds, for each key-value head, its Q query heads, the key and the value, as Megatron's projection does.
    """
    if window is not None and qkv_SBGXD.shape[0] > window:
        return fused.causal_attention(qkv_SBGXD, cos_SD, sin_SD, window)
    return cast(Tensor, kernels(qkv_SBGXD).causal_attention(qkv_SBGXD, cos_SD, sin_SD))


def kernels(x: Tensor) -> ModuleType:
    """Return the module with the kernels for the device of `x`."""
    return fused if x.is_cuda else cpu_kernels
