"""Recomputed layers keep only their input for the backward of a train_step, which runs them forward again (ADR 38)."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field, PlainValidator

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.layout import stages
from prefect_rlhf.placement.plan import Placement, Recompute
from prefect_rlhf.placement.words.word import MOST, Word, field_of

_AllOrLayers = Literal["all"] | Annotated[int, Field(ge=0, le=MOST)]


def _all_or_layers(value: object) -> object:
    """Accept a number of layers or `all`; a single mistake names both."""
    if value == "all" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST):
        return value
    raise ValueError("all, or the number of layers of each pipeline stage")


def _stage_layers(call: Call, placement: Placement, graph: DataflowGraph) -> int:
    """Return the layers of the stage with the most."""
    return len(stages(graph.model(call.role or "").shape.num_layers, placement.strategy.pp)[0])


def _wrong(call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
    field, value, model = field_of(call, RECOMPUTE.name), placement.recompute, graph.model(call.role or "")
    if value == "all" or placement.strategy.pp > model.shape.num_layers:
        return
    if value < 0:
        yield InvalidInput(field, value, "all, or a number of layers of 0 or more")
    elif value > (most := _stage_layers(call, placement, graph)):
        right = f"all, or at most {most}, the layers of a pipeline stage of {model.role}"
        yield InvalidInput(field, value, right)


def _values(call: Call, placement: Placement, graph: DataflowGraph) -> Sequence[Recompute]:
    return (*range(_stage_layers(call, placement, graph)), "all")


RECOMPUTE = Word[Recompute](
    name="recompute",
    default=0,
    type=Annotated[_AllOrLayers, PlainValidator(_all_or_layers, json_schema_input_type=_AllOrLayers)],
    description="Layers of a stage that run forward again: a number, or all.",
    calls=("train_step",),
    other_calls="has no backward pass",
    offered=lambda traits: traits.recomputes,
    other_engines="{} recomputes no layers".format,
    wrong=_wrong,
    values=_values,
    saves="later",
    moves_nothing=True,
    is_complex=True,
    effect=lambda placement: {"recompute": placement.recompute},
    setting=lambda placement: {"recompute": placement.recompute},
    phrase="recompute {}".format,
)
"""A number of layers of each pipeline stage, the first ones, or `all`."""
