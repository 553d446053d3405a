"""The parameters of a Llama-family model under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from prefect_rlhf.placement.model import ModelSpec, TransformerShape


@dataclass(frozen=True, slots=True)
class Parameter:
    """One weight: its global shape, the axis that tensor parallelism splits, and the layer it belongs to."""

    name: str
    shape: tuple[int, ...]
    split_axis: int | None = None
    layer: int | None = None
    over_vocabulary: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """All parameters of `model` in the order of a forward pass. Tied embeddings are one parameter."""
    return tuple(_parameters(model))


def num_parameters(model: ModelSpec) -> int:
    """Elements of all parameters."""
    return sum(parameter.num_elements for parameter in parameters(model))


def _parameters(model: ModelSpec) -> Iterator[Parameter]:
    shape = model.shape
    table = (shape.vocab_size, shape.hidden_size)
    yield Parameter("model.embed_tokens.weight", table, 0, over_vocabulary=True)
    for layer in range(shape.num_layers):
        yield from _layer(shape, layer)
    yield Parameter("model.norm.weight", (shape.hidden_size,))
    if "scalar" in model.head:
        yield Parameter("score.weight", (1, shape.hidden_size))
    if "lm" in model.head and not shape.tied_embeddings:
        yield Parameter("lm_head.weight", table, 0, over_vocabulary=True)


def _layer(shape: TransformerShape, layer: int) -> Iterator[Parameter]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    sizes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "input_layernorm": ((hidden,), None),
        "self_attn.q_proj": ((queries, hidden), 0),
        "self_attn.k_proj": ((keys, hidden), 0),
        "self_attn.v_proj": ((keys, hidden), 0),
        "self_attn.o_proj": ((hidden, queries), 1),
        "post_attention_layernorm": ((hidden,), None),
        "mlp.gate_proj": ((inner, hidden), 0),
        "mlp.up_proj": ((inner, hidden), 0),
        "mlp.down_proj": ((hidden, inner), 1),
    }
    for name, (size, axis) in sizes.items():
        yield Parameter(f"model.layers.{layer}.{name}.weight", size, axis, layer)
