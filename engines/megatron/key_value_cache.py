"""A cache of keys and values, and the two kinds of pass that fill it and attend to it.

Megatron's StaticInferenceContext is not used for two reasons. It has a single position for all rows, so prompts of
different lengths would have to be padded on the left and masked in every layer. And only Megatron's own attention reads
it, which RotaryAttention replaces. Here a row's token at position p is stored in place p of the row's slot, and the
remaining rows always fill the first slots. When a row ends, the last row moves into its slot. So finished rows cost no
computation, and each moves at most one other row.

Shapes: B rows, S tokens of the longest prompt, N packed tokens, H hidden, G key-value heads of this rank, Q query heads
for each of them, X = Q + 2 (queries, key, value), L places of a slot, D head dimension, W = G * X * D.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from prefect_rlhf.engines.megatron.fused import attention, choose_kernel
from prefect_rlhf.engines.megatron.packing import Packing
from prefect_rlhf.engines.megatron.rotary import Rotary, rotate


class KeyValueCache:
    """Keys and values of `num_rows` rows of `length` tokens in the layers of a pipeline stage, allocated once."""

    def __init__(self, layers: Any, num_rows: int, length: int, like: Tensor) -> None:
        attention = layers[0].self_attention
        self._first_layer: int = attention.layer_number
        heads, dim = attention.num_query_groups_per_partition, attention.hidden_size_per_attention_head
        self.tensor = like.new_zeros(len(layers), 2, num_rows, heads, length, dim)  # masked places are read

    @property
    def length(self) -> int:
        """L: places of a slot."""
        return self.tensor.shape[-2]

    def of_layer(self, number: int) -> tuple[Tensor, Tensor]:
        """The keys and values [B, G, L, D] of the layer with this number in Megatron."""
        keys, values = self.tensor[number - self._first_layer]
        return keys, values

    def move(self, sources: Tensor, targets: Tensor, num_tokens: int) -> None:
        """Copy the first tokens of rows from some slots to others."""
        self.tensor[:, :, targets, :, :num_tokens] = self.tensor[:, :, sources, :, :num_tokens]


@dataclass(frozen=True, slots=True)
class Prefill:
    """The pass over whole prompts, packed. They fill consecutive slots from `slot` on."""

    packing: Packing
    cache: KeyValueCache
    slot: int

    def attend(self, layer: int, qkv_NGXD: Tensor, rotary: Rotary, window: int | None) -> Tensor:
        """Rotate, store keys and values, attend causally or within a window; return [N, G * Q * D]."""
        qkv_SBW = self.packing.spread(qkv_NGXD.flatten(1))
        length, num_rows = qkv_SBW.shape[:2]
        heads_BGXSD = qkv_SBW.view(length, num_rows, *qkv_NGXD.shape[1:]).permute(1, 2, 3, 0, 4).contiguous()
        rotate(heads_BGXSD[:, :, :-1], *rotary.tables(length, self.cache.tensor))
        for cached, computed in zip(self.cache.of_layer(layer), heads_BGXSD[:, :, -2:].unbind(2), strict=True):
            cached[self.slot : self.slot + num_rows, :, :length] = computed
        query, key, value = heads_BGXSD[:, :, :-2].flatten(1, 2), heads_BGXSD[:, :, -2], heads_BGXSD[:, :, -1]
        mixed = attention(query, key, value, window)
        return self.packing.pack(mixed.permute(2, 0, 1, 3).flatten(2))


@dataclass(frozen=True, slots=True)
class Decode:
    """The pass over a new token of each row: row i is in slot i, its token at position `positions_B[i]`."""

    positions_B: Tensor
    slots_B: Tensor  # all rows' slots, to write a place in each
    num_places: int  # L
    cache: KeyValueCache
    shared: dict[Any, Any] = field(default_factory=dict)  # angles and masks, made in the first layer of a kind

    @classmethod
    def at(cls, positions_B: Tensor, num_places: int, cache: KeyValueCache) -> Decode:
        """Return the pass. `num_places` is the largest position plus 1."""
        slots_B = torch.arange(len(positions_B), device=positions_B.device)
        return cls(positions_B, slots_B, num_places, cache)

    def attend(self, layer: int, qkv_BGXD: Tensor, rotary: Rotary, window: int | None) -> Tensor:
        """Rotate, store keys and values, attend to the row's tokens or the last of them; return [B, G * Q * D]."""
        num_rows, num_places = len(qkv_BGXD), self.num_places
        heads_BGXD = qkv_BGXD.clone()
        rotate(heads_BGXD[:, :, :-1], *self._angles(rotary))
        keys, values = self.cache.of_layer(layer)
        keys[self.slots_B, :, self.positions_B] = heads_BGXD[:, :, -2]
        values[self.slots_B, :, self.positions_B] = heads_BGXD[:, :, -1]
        keys, values = (cached[:num_rows, :, :num_places] for cached in (keys, values))
        # the query heads of a group take the axis of positions in attention: they share keys, values and mask
        choose_kernel(heads_BGXD)
        mixed = F.scaled_dot_product_attention(heads_BGXD[:, :, :-2], keys, values, attn_mask=self._mask(window))
        return mixed.flatten(1)

    def _angles(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [B, 1, 1, D / 2]: the same angle for all heads."""
        if rotary not in self.shared:
            tables = rotary.tables(self.cache.length, self.cache.tensor)
            self.shared[rotary] = tuple(table[self.positions_B][:, None, None] for table in tables)
        return cast(tuple[Tensor, Tensor], self.shared[rotary])

    def _mask(self, window: int | None) -> Tensor:
        """Return [B, 1, 1, L]: 0 for a token that the new token attends to, minus infinity elsewhere."""
        if window not in self.shared:
            places, positions_B1 = (
                torch.arange(self.num_places, device=self.positions_B.device),
                self.positions_B[:, None],
            )
            hidden_BL = places > positions_B1
            if window is not None:
                hidden_BL |= places <= positions_B1 - window
            mask_BL = torch.zeros_like(hidden_BL, dtype=self.cache.tensor.dtype).masked_fill_(hidden_BL, -torch.inf)
            self.shared[window] = mask_BL[:, None, None]
        return cast(Tensor, self.shared[window])


CachedPass = Prefill | Decode
