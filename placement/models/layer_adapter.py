"""Sizes of a layer's adapter: elements on a device, moves and sums over devices. All layers have equal adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import Parameter, parts

QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
GATES = ("gate_proj", "up_proj")
"""Matrices that Megatron fuses: it multiplies with all their A's at once, and with all their B's as one matrix."""


class LayerElements(NamedTuple):
    """Elements of a layer: those split by tp, the part of these that makes keys and values, and all others."""

    split: int
    keys_and_values: int
    whole: int


class OnDevice(NamedTuple):
    """A layer's adapter on each of tp devices: its elements, its tensors, and how many numbers it adds per token."""

    elements: int
    tensors: tuple[int, ...]
    outputs: int


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """The `parameters` of a layer's adapter: for each of its matrices, A [rank, in] and B [out, rank]."""

    parameters: tuple[Parameter, ...]
    _on: dict[int, OnDevice] = field(default_factory=dict, init=False, repr=False, compare=False, hash=False)

    @classmethod
    def of(cls, model: ModelSpec) -> LayerAdapter | None:
        """Return the adapter of each layer of a model; None for a model without an adapter."""
        if model.adapter is None:
            return None
        return cls(tuple(parameter for parameter in parts(model)["adapter"] if parameter.layer == 0))

    @property
    def rank(self) -> int:
        return self.parameters[0].shape[0]

    @property
    def num_matrices(self) -> int:
        return len(self.parameters) // 2

    def count(self, *matrices: str) -> int:
        """Return how many of the layer's matrices it adapts."""
        return sum(_is_a(each) and _matrix(each) in matrices for each in self.parameters)

    def on(self, tp: int) -> OnDevice:
        """Return its sizes on each of tp devices, counted once."""
        known = self._on.get(tp)
        if known is None:
            known = self._on[tp] = self._counted(tp)
        return known

    @property
    def layer_elements(self) -> LayerElements:
        """Elements of the layer's A's and B's. Keys and values have a B each."""
        split = [each for each in self.parameters if each.split_axis is not None]
        keys = sum(each.num_elements for each in split if each.most_parts is not None)
        elements = sum(each.num_elements for each in split)
        return LayerElements(elements, keys, self.on(1).elements - elements)

    @property
    def narrow(self) -> int:
        """How many numbers a token has between all A's and B's."""
        return self.rank * self.num_matrices

    @property
    def reduces(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """How many numbers per token the tp ranks add up, by message: forward, and backward.

        Forward after each A that tp splits, backward before the A's of matrices with B's that tp splits.
        """
        fused = (self.count(*QUERIES_KEYS_VALUES), self.count(*GATES))
        forward = tuple(self.rank for each in self.parameters if _is_a(each) and each.split_axis is not None)
        return forward, tuple(self.rank * matrices for matrices in fused if matrices)

    def _counted(self, tp: int) -> OnDevice:
        tensors: dict[object, int] = {}
        for each in self.parameters:
            matrix = _matrix(each)
            fused = next((group for group in (QUERIES_KEYS_VALUES, GATES) if matrix in group and _is_a(each)), each)
            tensors[fused] = tensors.get(fused, 0) + each.elements_of(tp)
        outputs = (each.elements_of(tp) // self.rank for each in self.parameters if not _is_a(each))
        return OnDevice(sum(tensors.values()), tuple(tensors.values()), sum(outputs))


def _is_a(parameter: Parameter) -> bool:
    return parameter.name.endswith(".lora_A.weight")


def _matrix(parameter: Parameter) -> str:
    """The name of the adapted matrix: `q_proj` of model.layers.0.self_attn.q_proj.lora_A.weight."""
    return parameter.name.split(".")[-3]
