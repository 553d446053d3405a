"""Sequence parallelism: a train_step divides tokens over tp wherever it does not divide products (ADR 39)."""

from collections.abc import Iterator, Sequence

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.words.word import Word, field_of


def _wrong(call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
    if placement.strategy.tp == 1:
        yield NotUsed(field_of(call, SEQUENCE_PARALLEL.name), True, "it divides tokens over tp, which is 1")


def _values(call: Call, placement: Placement, graph: DataflowGraph) -> Sequence[bool]:
    return (False, True) if placement.strategy.tp > 1 else (False,)


SEQUENCE_PARALLEL = Word(
    name="sequence_parallel",
    default=False,
    type=bool,
    description="Divide a train_step's tokens over tp between products.",
    calls=("train_step",),
    other_calls="saves no activations",
    offered=lambda traits: traits.divides_sequences,
    other_engines="{} divides no sequences".format,
    wrong=_wrong,
    values=_values,
    is_searched=True,
    saves="first",
    moves_nothing=True,
    effect=lambda placement: {"tokens_over_tp": True},
    setting=lambda placement: {"tokens_over_tp": True},
    phrase=lambda _: "sequence parallel",
)
