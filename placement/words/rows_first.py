"""Rows first: the rows of a call move to their readers directly after it, ahead of other calls (ADR 42)."""

from collections.abc import Iterator

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.words.word import Word, every_engine, field_of


def sends_rows(call: Call, graph: DataflowGraph) -> bool:
    """Whether some call reads rows that this call makes."""
    return any(call.name in graph.reads_of(other.name) for other in graph)


def _wrong(call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
    if not sends_rows(call, graph):
        yield NotUsed(field_of(call, ROWS_FIRST.name), True, "no call reads its rows")


ROWS_FIRST = Word(
    name="rows_first",
    default=False,
    type=bool,
    description="Move the rows to their readers before other calls begin.",
    offered=every_engine,
    wrong=_wrong,
    phrase=lambda _: "rows first",
)
