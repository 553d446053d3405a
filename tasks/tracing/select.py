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
    """Keep only some rows of the first input, with its keys. Your computation says which: it returns the key `keep`.

    `keep` [B] has truth values or places (1 is first); rows with 0 or NaN are dropped. A group is all rows made from
    the same row, such as the responses to a prompt, or the rows of one item, such as a pair. Of the groups with a kept
    row, the first `at_most` stay (None: all), in dataset order. With `per_group`, exactly this many rows stay in each
    group, sorted by place, and a group with fewer is dropped. A loss on pairs then finds the row with place 1 first and
    the row with place 2 second. Without it, a group keeps any number of rows.

    Later calls on the kept rows can still read everything that was made from them before. Means are over the kept rows.
    If no row is kept, computations do not run and the optimizer step is skipped: the step learns nothing, and the run's
    `most_empty_steps` limits how many such steps may follow each other. Memory is planned for `at_most` groups, time
    for `expected` groups (None: `at_most`).
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
