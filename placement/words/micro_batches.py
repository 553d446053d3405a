"""Micro-batches: a replica's rows of a mini-batch run in several parts, so that fewer activations exist at a time."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import EngineKind, Placement
from prefect_rlhf.placement.words.parts import PARTS
from prefect_rlhf.placement.words.word import MOST, Word, field_of


def most_micro_batches(call: Call, placement: Placement) -> int:
    """Return how many micro-batches of a single item the fullest replica would have."""
    return max(each.cut(placement.parts).most_items(placement.strategy.dp) for each in call.by_row_set)


def _not_in(engine: EngineKind) -> str:
    instead = ", cache_gib limits the memory of its rows" if TRAITS[engine].paged_cache else ""
    return f"{engine} has no micro-batches{instead}"


def _wrong(call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
    """Check that each micro-batch of the fullest replica has an item."""
    count, parts = placement.micro_batches, placement.parts
    if count < 1:
        yield InvalidInput(field_of(call, MICRO_BATCHES.name), count, "1 or more")
    elif parts != 1 and any(PARTS.mistakes(call, placement, graph)):
        return  # it cuts parts
    elif count > (most := max(1, most_micro_batches(call, placement))):
        piece = "mini-batch" if parts == 1 else f"part, with parts {parts}"
        yield InvalidInput(
            field_of(call, MICRO_BATCHES.name), count, f"at most {most}, the items that a replica has of a {piece}"
        )


def _values(call: Call, placement: Placement, graph: DataflowGraph) -> Sequence[int]:
    """Return the numbers of equal micro-batches, and without a pipeline 2, 4, 8, ...

    With a pipeline, some uneven number of micro-batches may need more memory than a smaller one.
    """
    most = most_micro_batches(call, placement)
    even = {number for number in range(1, most + 1) if most % number == 0}
    powers = {1 << power for power in range(most.bit_length())} if placement.strategy.pp == 1 else set()
    return sorted(even | powers)


MICRO_BATCHES = Word(
    name="micro_batches",
    default=1,
    type=Annotated[int, Field(ge=1, le=MOST)],
    description="Parts of a replica's mini-batch that run in sequence.",
    offered=lambda traits: traits.micro_batches,
    other_engines=_not_in,
    wrong=_wrong,
    values=_values,
    saves="first",
    moves_nothing=True,
    of_evaluation=True,
    is_written=True,
    effect=lambda placement: {"micro_batches": placement.micro_batches},
    setting=lambda placement: {"micro_batches": placement.micro_batches},
    phrase="{} micro-batches".format,
)
"""Per data-parallel replica and mini-batch."""
