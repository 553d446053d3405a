"""The parameters of a decoder under their Hugging Face names; a layer's experts are stacked."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from prefect_rlhf.placement.models.families.family import axis_length
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight: its global shape, the axis that tensor parallelism splits, and its layer.

    `most_parts`, if given, is the largest number of parts: keys and values are cut by whole heads. More tp ranks hold
    copies of parts, neighbours the same copy. ep divides the first axis of a parameter that is `over_experts`.
    """

    name: str
    shape: tuple[int, ...]
    split_axis: int | None = None
    layer: int | None = None
    over_vocabulary: bool = False
    most_parts: int | None = None
    over_experts: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


def parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """Return all parameters of `model` in the order of a forward pass. Tied embeddings are a single parameter."""
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
    for weight in FAMILIES[shape.family].layer:
        size, name = tuple(axis_length(axis, shape) for axis in weight.axes), f"model.layers.{layer}.{weight.name}"
        most = shape.num_kv_heads if weight.axes[0] == "keys" else None
        split, of_experts = weight.split_axis, weight.of_experts
        yield Parameter(f"{name}.weight", size, split, layer, most_parts=most, over_experts=of_experts)
        if weight.name in shape.biases:
            axis = 0 if weight.split_axis == 0 else None
            yield Parameter(f"{name}.bias", size[:1], axis, layer, most_parts=most)
