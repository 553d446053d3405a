"""The size of a paged key-value cache on each device: rows without room in it wait, or are preempted."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.words.word import MOST, Word, field_of


def _wrong(call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
    if placement.cache_gib is not None and not placement.cache_gib > 0:
        yield InvalidInput(field_of(call, CACHE.name), placement.cache_gib, "more than 0")


CACHE = Word[float | None](
    name="cache_gib",
    default=None,
    type=Annotated[float, Field(gt=0, le=MOST)],
    description="GiB of vLLM's key-value cache on a device.",
    offered=lambda traits: traits.paged_cache,
    other_engines="{} has no cache".format,
    wrong=_wrong,
    moves_nothing=True,
    of_copy=True,
    rebuilds=True,
    of_evaluation=True,
    effect=lambda placement: {"cache_bytes": placement.cache_bytes},
    phrase="a cache of {:g} GiB".format,
)
"""None means room for all rows of a replica at maximum length."""
