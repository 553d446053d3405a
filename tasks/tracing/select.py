"""The function of a flow body that selects rows: the graph is static, and each step determines the selected rows."""

from __future__ import annotations

from typing import Any

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.row_set import Choice, RowSet
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.arguments import naming_arguments
from prefect_rlhf.tasks.tracing.calls import check_computation
from prefect_rlhf.tasks.tracing.operations import Operator
from prefect_rlhf.tasks.tracing.trace import RowsHandle, current_trace


@naming_arguments
def select(
    operator: Operator[Any, Any],
    *inputs: object,
    at_most: int | None = None,
    per_group: int | None = None,
    expected: int | None = None,
    settings: Settings,
    every: int | None = None,
    name: str | None = None,
) -> RowsHandle:
    """Keep some rows: the keys of the first input, on the rows that a @computation of the key `keep` selects.

    `keep` is [B]: truth values or places; rows with 0 or NaN are dropped. A group is the rows made of one row, or the
    rows of an item, such as a pair. The first `at_most` groups with a kept row are kept (None: all), in the order of
    the dataset. With `per_group`, exactly this many rows of each group are kept, in the order of their places; a group
    with fewer such rows is dropped. A loss of pairs thus uses the row with place 1 as the first and the row with place
    2 as the second of a pair. Without `per_group`, any number of rows of a group is kept.

    Rows keep their numbers: calls on kept rows can read everything that was made of the rows before. Means are over the
    kept rows. Without kept rows, a computation is not run and an optimizer step is skipped: nothing is learnt, and the
    run's `most_empty_steps` bounds such steps. Memory is planned for `at_most` groups, time for `expected` groups
    (None: `at_most`).
    """
    trace = current_trace("select")
    check_computation(trace, operator)
    name = name or operator.name
    where = f"flow {trace.flow}: select {name}"
    if operator.outputs != ("keep",) or operator.stateful:
        expected_kind = 'a @computation("keep"), without state'
        raise GraphError(
            f"{where}: {operator.name} makes {', '.join(operator.outputs) or 'no key'}, not {expected_kind}"
        )
    handles = [trace.rows(rows, "select", None, every) for rows in inputs]
    operator.check_arguments(trace.flow, len(handles))
    if not handles:
        raise GraphError(f"{where} has no input; it needs rows of a call or dataset")
    own = trace.common_rows(handles, f"select {name}")
    choice = _choice(where, own, at_most, per_group, expected)
    kept = RowSet(name, own.rows.dataset, 1, own.rows, choice)
    trace.add(
        Call(
            name=name,
            kind="compute",
            role=None,
            inputs=tuple(handle.port(own.rows) for handle in handles),
            outputs=(),
            operation=operator(settings).operation,
            rows=own.rows,
            num_rows=own.num_rows,
            every=every,
            rows_per_item=own.rows_per_item,
            chooses=kept,
        )
    )
    source = next(handle for handle in handles if own.rows.per_row(handle.rows) == 1)
    return RowsHandle(source.source, source.keys, kept, choice.count.at_most, per_group or 1)


def _choice(where: str, own: RowsHandle, at_most: int | None, per_group: int | None, expected: int | None) -> Choice:
    """Return the limits of a selection. Raises GraphError for an impossible number."""
    size, chosen = own.rows.group_size, own.rows.choice
    num_groups = chosen.at_most if chosen else own.num_rows // size
    most = num_groups if at_most is None else at_most
    numbers = {
        "at_most": (most, num_groups, f"the groups of {own.rows.name}"),
        "per_group": (1 if per_group is None else per_group, size, f"the rows of a group of {own.rows.name}"),
        "expected": (most if expected is None else expected, most, "at_most"),
    }
    for field, (seen, highest, what) in numbers.items():
        if isinstance(seen, bool) or not isinstance(seen, int) or not 1 <= seen <= highest:
            raise GraphError(f"{where}: got {field} {seen!r:.40}, expected 1 to {highest}, {what}")
    num_rows = chosen.num_rows if chosen else own.num_rows
    return Choice(num_rows, size, most, most if expected is None else expected, per_group)
