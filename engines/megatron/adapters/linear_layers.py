"""The four linear layers of Megatron's transformer layer: the matrices that each fuses, and what a rank has of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from megatron.core.transformer import ModuleSpec

from prefect_rlhf.engines.megatron.core_versions import feed_forward_parts
from prefect_rlhf.placement.models.families.family import Part
from prefect_rlhf.placement.models.model import TransformerShape


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A linear layer under Megatron's name, in attention or in the feed-forward part.

    `matrices` are the names that an adapter has for the matrices whose rows it fuses, by their parts, in its order. tp
    splits its outputs (axis 0) or its inputs (axis 1).
    """

    owner: Literal["self_attention", "mlp"]
    name: str
    matrices: Mapping[Part, str]
    split_axis: Literal[0, 1]

    def of(self, layer: Any) -> Any:
        """Return the module in a transformer layer."""
        return getattr(getattr(layer, self.owner), self.name)

    def in_spec(self, parts: Any) -> Any:
        """Return its class, or what makes it, in the submodules of a layer's spec."""
        return getattr(self._owner_parts(parts), self.name)

    def put(self, parts: Any, kind: type, options: Mapping[str, Any]) -> None:
        """Let a layer's spec make it of a class with options."""
        # Megatron calls the class of the first by itself, and builds the others from a spec
        made = partial(kind, **options) if self is QUERIES_KEYS_VALUES else ModuleSpec(kind, dict(options))
        setattr(self._owner_parts(parts), self.name, made)

    def _owner_parts(self, parts: Any) -> Any:
        return feed_forward_parts(parts) if self.owner == "mlp" else parts.self_attention.submodules


QUERIES_KEYS_VALUES = LinearLayer(
    "self_attention",
    "linear_qkv",
    MappingProxyType({"queries": "q_proj", "keys": "k_proj", "values": "v_proj"}),
    0,
)
"""For each group of query heads it has their queries, the key and the value."""
ATTENTION_OUTPUT = LinearLayer("self_attention", "linear_proj", MappingProxyType({"attention_output": "o_proj"}), 1)
GATES = LinearLayer("mlp", "linear_fc1", MappingProxyType({"gate": "gate_proj", "up": "up_proj"}), 0)
"""On each rank, gate is above up."""
DOWN = LinearLayer("mlp", "linear_fc2", MappingProxyType({"down": "down_proj"}), 1)
LINEAR_LAYERS = (QUERIES_KEYS_VALUES, ATTENTION_OUTPUT, GATES, DOWN)


@dataclass(frozen=True, slots=True)
class Fusion:
    """A fused layer's row order: `groups` groups, each with `rows[name]` rows of each matrix."""

    rows: Mapping[str, int]
    groups: int = 1

    @classmethod
    def of(cls, layer: LinearLayer, shape: TransformerShape, tp: int) -> Fusion:
        """Return the row order on a rank of tp, which has at least one key-value head."""
        if layer is QUERIES_KEYS_VALUES:
            heads = max(shape.num_kv_heads, tp)
            queries = shape.num_attention_heads // heads * shape.head_dim
            return cls({"q_proj": queries, "k_proj": shape.head_dim, "v_proj": shape.head_dim}, heads // tp)
        rows = shape.intermediate_size // tp if layer is GATES else shape.hidden_size
        return cls(dict.fromkeys(layer.matrices.values(), rows))


@dataclass(frozen=True, slots=True)
class HeldMatrix:
    """A rank's part of a matrix, from row and column `first` on; the whole matrix has `shape`."""

    name: str
    first: tuple[int, int]
    shape: tuple[int, int]


@dataclass(frozen=True, slots=True)
class HeldMatrices:
    """The matrices that a layer fuses, in row order."""

    matrices: tuple[HeldMatrix, ...]
    fusion: Fusion

    @classmethod
    def of(cls, layer: LinearLayer, shape: TransformerShape, tp: int, index: int) -> HeldMatrices:
        """Return a layer's matrices on tp rank `index`; neighbours may have copies of a head."""
        fusion = Fusion.of(layer, shape, tp)
        return cls(tuple(_held(name, layer, shape, (tp, index)) for name in fusion.rows), fusion)


def _held(matrix: str, layer: LinearLayer, shape: TransformerShape, part: tuple[int, int]) -> HeldMatrix:
    tp, index = part
    if layer is QUERIES_KEYS_VALUES:
        heads = shape.num_attention_heads if matrix == "q_proj" else shape.num_kv_heads
        first, whole = heads * index // tp * shape.head_dim, (heads * shape.head_dim, shape.hidden_size)
    elif layer is GATES:
        first, whole = shape.intermediate_size * index // tp, (shape.intermediate_size, shape.hidden_size)
    else:
        inputs = shape.intermediate_size if layer is DOWN else shape.num_attention_heads * shape.head_dim
        first, whole = inputs * index // tp, (shape.hidden_size, inputs)
    return HeldMatrix(matrix, (first, 0) if layer.split_axis == 0 else (0, first), whole)
