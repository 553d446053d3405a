"""The parameters of a dense decoder under their Hugging Face names."""

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
    """Return all parameters of `model` in the order of a forward pass. Tied embeddings are one parameter."""
    shape = model.shape
    table = (shape.vocab_size, shape.hidden_size)
    layers = (parameter for layer in range(shape.num_layers) for parameter in _layer(shape, layer))
    ends = [Parameter("model.norm.weight", (shape.hidden_size,))]
    if "scalar" in model.head:
        ends.append(Parameter("score.weight", (1, shape.hidden_size)))
    if "lm" in model.head and not shape.tied_embeddings:
        ends.append(Parameter("lm_head.weight", table, 0, over_vocabulary=True))
    return (Parameter("model.embed_tokens.weight", table, 0, over_vocabulary=True), *layers, *ends)


def num_parameters(model: ModelSpec) -> int:
    """Count the elements of all parameters."""
    return sum(parameter.num_elements for parameter in parameters(model))


def _layer(shape: TransformerShape, layer: int) -> Iterator[Parameter]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    head = (shape.head_dim,)
    sizes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "input_layernorm": ((hidden,), None),
        "self_attn.q_proj": ((queries, hidden), 0),
        "self_attn.k_proj": ((keys, hidden), 0),
        "self_attn.v_proj": ((keys, hidden), 0),
        **({"self_attn.q_norm": (head, None), "self_attn.k_norm": (head, None)} if shape.qk_norm else {}),
        "self_attn.o_proj": ((hidden, queries), 1),
        "post_attention_layernorm": ((hidden,), None),
        **({"pre_feedforward_layernorm": ((hidden,), None)} if shape.norms_after else {}),
        "mlp.gate_proj": ((inner, hidden), 0),
        "mlp.up_proj": ((inner, hidden), 0),
        "mlp.down_proj": ((hidden, inner), 1),
        **({"post_feedforward_layernorm": ((hidden,), None)} if shape.norms_after else {}),
    }
    for name, (size, axis) in sizes.items():
        yield Parameter(f"model.layers.{layer}.{name}.weight", size, axis, layer)
        if name in shape.biases:
            yield Parameter(f"model.layers.{layer}.{name}.bias", size[:1], 0 if axis == 0 else None, layer)
