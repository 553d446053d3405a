"""Weights: a model's parameters in named sets. Each set is versioned, moved, stored and checked by its name.

A model has a set for each of its parts: a trunk, a language-model head, a scalar head, an adapter. Parameters have
their Hugging Face names (an adapter's have PEFT's names without its prefix); a layer's experts are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.models.families.family import Weight, axis_length
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.four_bits import BLOCK, nested_scales
from prefect_rlhf.placement.models.model import ModelSpec, TransformerShape

StoredDtype = Literal["uint8", "float32"]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight: its global shape, the axis that tensor parallelism splits, and its layer."""

    name: str
    shape: tuple[int, ...]
    split_axis: int | None = None
    layer: int | None = None
    over_vocabulary: bool = False
    most_parts: int | None = None
    """The most parts, because keys and values are split by whole heads. With more tp ranks, neighbours hold copies of
    the same part."""
    over_experts: bool = False
    """Whether ep divides its first axis."""
    dtype: StoredDtype | None = None
    """Its own format; None means the model's."""

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def elements_of(self, tp: int) -> int:
        """Return the largest number of elements that any of tp devices holds."""
        if self.split_axis is None:
            return self.num_elements
        size, parts = self.shape[self.split_axis], min(tp, self.most_parts or tp)
        return self.num_elements // size * -(-size // parts)


@dataclass(frozen=True, slots=True)
class Weights:
    """A set of parameters with a version of its own, under a name that is unique in a graph: `actor.trunk`.

    A train_step writes `trained` weights, and each of its runs makes a version. Frozen weights keep version 0.

    Weights that are `made_of` a part of a model are pickled as model and part, because a command to 128 ranks would
    otherwise carry megabytes of parameters.
    """

    name: str
    parameters: tuple[Parameter, ...] = field(repr=False)
    trained: bool
    made_of: tuple[ModelSpec, str] | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Callable[..., Weights], tuple[Any, ...]]:
        if self.made_of is None:
            return Weights, (self.name, self.parameters, self.trained)
        return _weights, (self.name, *self.made_of, self.trained)

    @property
    def part(self) -> str:
        """The part of the model that these weights are."""
        return self.name.rpartition(".")[2]

    def version(self, trained: int) -> int:
        """Return their version if the trained weights of the same model have version `trained`."""
        return trained if self.trained else 0


@dataclass(frozen=True, slots=True)
class Part:
    """A part of models. `parameters` are in the order of a forward pass; if empty, the model does not have the part.

    A train_step of a model writes the part if it `learns`.
    """

    parameters: Callable[[ModelSpec], Iterable[Parameter]]
    learns: Callable[[ModelSpec], bool] = lambda model: True


def _trunk(model: ModelSpec) -> Iterator[Parameter]:
    shape = model.shape
    yield Parameter("model.embed_tokens.weight", (shape.vocab_size, shape.hidden_size), 0, over_vocabulary=True)
    for layer in range(shape.num_layers):
        yield from _layer(model, layer)
    yield Parameter("model.norm.weight", (shape.hidden_size,))


def _scalar_head(model: ModelSpec) -> Iterator[Parameter]:
    if "scalar" in model.head:
        yield Parameter("score.weight", (1, model.shape.hidden_size))


def _lm_head(model: ModelSpec) -> Iterator[Parameter]:
    shape = model.shape
    if "lm" in model.head and not shape.tied_embeddings:  # a tied head is the trunk's embedding
        yield Parameter("lm_head.weight", (shape.vocab_size, shape.hidden_size), 0, over_vocabulary=True)


def _adapter(model: ModelSpec) -> Iterator[Parameter]:
    """Yield A [rank, in] and B [out, rank] of each adapted matrix [out, in], split as that is.

    Of a matrix that tp splits by outputs B is split, and A is whole; of one split by inputs the other way round.
    """
    if model.adapter is None:
        return
    if model.shape.experts is not None:
        raise GraphError(f"{model.role} is a mixture of experts, which can have no adapter yet")
    adapted = [each for each in adapted_weights(model.shape) if matrix_name(each) in model.adapter.matrices]
    for layer in range(model.shape.num_layers):
        for weight in adapted:
            outputs, inputs = (axis_length(axis, model.shape) for axis in weight.axes)
            name, by_inputs = f"model.layers.{layer}.{weight.name}", weight.split_axis == 1
            most = _most_parts(weight, model.shape)
            yield Parameter(f"{name}.lora_A.weight", (model.adapter.rank, inputs), 1 if by_inputs else None, layer)
            split = None if by_inputs else weight.split_axis
            yield Parameter(f"{name}.lora_B.weight", (outputs, model.adapter.rank), split, layer, most_parts=most)


def adapted_weights(shape: TransformerShape) -> tuple[Weight, ...]:
    """Return a layer's weights that an adapter can be put beside: its matrices."""
    return tuple(weight for weight in FAMILIES[shape.family].layer if len(weight.axes) == 2 and weight.part != "router")


def matrix_name(weight: Weight) -> str:
    """Return an adapter's name for a weight of a layer: `q_proj` for `self_attn.q_proj`."""
    return weight.name.rpartition(".")[2]


def _has_no_adapter(model: ModelSpec) -> bool:
    return model.adapter is None


PARTS: dict[str, Part] = {
    "trunk": Part(_trunk, learns=_has_no_adapter),
    "scalar_head": Part(_scalar_head),
    "lm_head": Part(_lm_head, learns=_has_no_adapter),
    "adapter": Part(_adapter),
}
"""Every part that a model may have, in the order of a forward pass."""
_IN_SHAPE = frozenset(PARTS)  # a shape, a head and an adapter describe these, so sizes have them in closed form


def parts(model: ModelSpec) -> Mapping[str, tuple[Parameter, ...]]:
    """Return the parameters of each part that a model has."""
    return _parts(model, tuple(PARTS.items()))


@lru_cache(maxsize=64)  # layouts, certificates and commands of a run ask for the same few models
def _parts(model: ModelSpec, known: tuple[tuple[str, Part], ...]) -> Mapping[str, tuple[Parameter, ...]]:
    found = {name: tuple(part.parameters(model)) for name, part in known}
    return {name: own for name, own in found.items() if own}


def four_bits_of(matrix: Parameter) -> Iterator[Parameter]:
    """Yield the tensors of a four-bit matrix [out, in], under bitsandbytes' names and split like the matrix.

    They are pairs of numbers, an 8-bit scale for each block, and the scales' scales, which every rank holds completely.
    """
    outputs, inputs = matrix.shape
    scales = outputs * inputs // BLOCK
    yield replace(matrix, shape=(outputs, inputs // 2), dtype="uint8")
    yield replace(matrix, name=f"{matrix.name}.absmax", shape=(outputs, inputs // BLOCK), dtype="uint8")
    yield Parameter(f"{matrix.name}.nested_absmax", (nested_scales(scales),), layer=matrix.layer, dtype="float32")


def quantized_matrices(model: ModelSpec) -> tuple[Parameter, ...]:
    """Return the model's matrices that are stored in four bits, as they are in its folder."""
    if model.base_dtype is None:
        return ()
    plain = parts(replace(model, base_dtype=None))["trunk"]
    return tuple(each for each in plain if each.layer is not None and len(each.shape) == 2)


def further_parameters(model: ModelSpec, learning: bool) -> tuple[Parameter, ...]:
    """Return all parameters except trunk, heads and adapter: of parts that a train_step writes, or of all other
    parts.
    """
    further = [name for name, part in PARTS.items() if name not in _IN_SHAPE and part.learns(model) == learning]
    return tuple(parameter for name in further for parameter in parts(model).get(name, ()))


def parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """Return all parameters of `model` in the order of a forward pass. Tied embeddings are a single parameter."""
    return tuple(parameter for own in parts(model).values() for parameter in own)


def num_parameters(model: ModelSpec) -> int:
    """Count the elements of all parameters."""
    return sum(parameter.num_elements for parameter in parameters(model))


def weights_of(model: ModelSpec, trained: bool) -> tuple[Weights, ...]:
    """Return the weights of a role's model, a set for each part, named after role and part: `actor.trunk`.

    `trained` says whether the model has a train_step.
    """
    return _weights_of(model, trained, tuple(PARTS.items()))


@lru_cache(maxsize=64)
def _weights_of(model: ModelSpec, trained: bool, known: tuple[tuple[str, Part], ...]) -> tuple[Weights, ...]:
    own = {name: trained and part.learns(model) for name, part in known if name in parts(model)}
    return tuple(_weights(f"{model.role}.{name}", model, name, learns) for name, learns in own.items())


def named_weights(models: tuple[ModelSpec, ...], trained: frozenset[str]) -> Mapping[str, tuple[Weights, ...]]:
    """Return the weights of each role's model. The `trained` roles have a train_step.

    Models with the same content share frozen weights, named after the first of the roles. Raises GraphError if their
    shapes differ.
    """
    return _named_weights(models, trained, tuple(PARTS.items()))


@lru_cache(maxsize=64)
def _named_weights(
    models: tuple[ModelSpec, ...], trained: frozenset[str], known: tuple[tuple[str, Part], ...]
) -> Mapping[str, tuple[Weights, ...]]:
    first: dict[object, tuple[ModelSpec, Weights]] = {}

    def named(model: ModelSpec, own: Weights) -> Weights:
        if own.trained or not model.content:
            return own
        adapter = model.adapter if own.part == "adapter" else None
        key = (model.content, model.dtype, model.base_dtype, own.part, adapter)
        other, shared = first.setdefault(key, (model, own))
        theirs, mine = ({parameter.name: parameter for parameter in each.parameters} for each in (shared, own))
        for name in theirs | mine if theirs != mine else ():
            if theirs.get(name) != mine.get(name):
                shapes = f"is {_shape(theirs.get(name))} in {other.role} and {_shape(mine.get(name))} in {model.role}"
                both = f"{other.role} and {model.role} name the same weights, {shared.name}"
                raise GraphError(f"{both}, but {name} {shapes}; read them from separate folders")
        return _weights(shared.name, model, own.part, trained=False)

    return {
        model.role: tuple(named(model, own) for own in weights_of(model, model.role in trained)) for model in models
    }


def _shape(parameter: Parameter | None) -> str:
    return "absent" if parameter is None else str(parameter.shape)


def _weights(name: str, model: ModelSpec, part: str, trained: bool) -> Weights:
    return Weights(name, parts(model)[part], trained, (model, part))


def _most_parts(weight: Weight, shape: TransformerShape) -> int | None:
    """Return the most parts into which tp can cut a weight's outputs: keys and values by heads; None for no limit."""
    return shape.num_kv_heads if weight.axes[0] == "keys" else None


def _layer(model: ModelSpec, layer: int) -> Iterator[Parameter]:
    shape = model.shape
    for weight in FAMILIES[shape.family].layer:
        size, name = tuple(axis_length(axis, shape) for axis in weight.axes), f"model.layers.{layer}.{weight.name}"
        most = _most_parts(weight, shape)
        split, of_experts = weight.split_axis, weight.of_experts
        whole = Parameter(f"{name}.weight", size, split, layer, most_parts=most, over_experts=of_experts)
        yield from four_bits_of(whole) if model.base_dtype and len(size) == 2 else (whole,)
        if weight.name in shape.biases:
            axis = 0 if weight.split_axis == 0 else None
            yield Parameter(f"{name}.bias", size[:1], axis, layer, most_parts=most)
