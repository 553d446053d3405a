"""Which tensors of frozen weights have equal bytes in two engines, so that both can compute from the same."""

from __future__ import annotations

from typing import Literal

from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.layout.layout import padded_vocabulary
from prefect_rlhf.placement.models.layer_adapter import QUERIES_KEYS_VALUES
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import Parameter, Weights
from prefect_rlhf.placement.plan import EngineKind

LENT_PARTS = ("trunk", "lm_head")
"""The parts of a model that an engine lends to another."""
Unlike = Literal["heads", "vocabulary"]
"""Tensors that two engines may hold differently: queries, keys and values; the embedding and the output matrix."""


def unlike(model: ModelSpec, engine: EngineKind, other: EngineKind, tp: int) -> frozenset[Unlike]:
    """Return the tensors with other bytes in another engine; all others are equal on each of tp devices.

    An engine sorts the rows of queries, keys and values by groups of heads or by kind. With a single key-value head on
    a device, both orders are the same. If engines pad the vocabulary to different sizes, tp cuts it at different
    tokens.
    """
    found: set[Unlike] = set()
    if TRAITS[engine].groups_heads != TRAITS[other].groups_heads and model.shape.num_kv_heads > tp:
        found.add("heads")
    if tp > 1 and padded_vocabulary(model, engine, tp) != padded_vocabulary(model, other, tp):
        found.add("vocabulary")
    return frozenset(found)


def lent_parameters(own: Weights, model: ModelSpec, engine: EngineKind, other: EngineKind, tp: int) -> tuple[str, ...]:
    """Return the parameters of some weights that an engine takes from an instance of another engine, or of its own."""
    different = unlike(model, engine, other, tp)
    return tuple(each.name for each in own.parameters if _kind(each) not in different)


def _kind(parameter: Parameter) -> Unlike | None:
    if parameter.over_vocabulary:
        return "vocabulary"
    return "heads" if set(parameter.name.split(".")) & set(QUERIES_KEYS_VALUES) else None
