"""Parts: a call's rows are cut into equal parts by whole groups, and readers begin when the first part has ended.

Each part is a task run (ADR 40).
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.rows.shares import num_groups
from prefect_rlhf.placement.words.word import MOST, Word, every_engine, field_of


def _wrong(call: Call, placement: Placement, graph: DataflowGraph) -> Iterator[InvalidInput]:
    """Check that parts are equal, of whole groups, and that each fills a pipeline."""
    field, parts = field_of(call, PARTS.name), placement.parts
    if parts < 1:
        yield InvalidInput(field, parts, "1 or more")
    elif call.rows.choices:
        chooser = call.waits_for_choices[0]
        yield NotUsed(field, parts, f"its rows are chosen, by {chooser}, which needs all rows at once")
    elif (groups := num_groups(graph, call)) < parts:
        yield InvalidInput(field, parts, f"at most {groups}, the step's groups of rows")
    elif groups % parts:
        yield InvalidInput(field, parts, f"a divisor of {groups}, the step's groups of rows")
    else:
        strategy, cut = placement.strategy, call.cut(parts)
        rows = cut.most_items(strategy.dp) * cut.rows_per_item
        if strategy.pp > rows:
            right = f"fewer: a part has {rows} rows for each replica, too few for a pipeline of {strategy.pp} stages"
            yield InvalidInput(field, parts, right)


PARTS = Word(
    name="parts",
    default=1,
    type=Annotated[int, Field(ge=1, le=MOST)],
    description="Equal parts of the rows of a generate or an inference.",
    calls=("generate", "inference"),
    other_calls="needs all rows of the step at once",
    offered=every_engine,
    wrong=_wrong,
    rebuilds=True,
    phrase="{} parts".format,
)
