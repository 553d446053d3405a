"""Plans and graphs for people: as tables and as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from prefect_rlhf.errors.table import table
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.devices.axes import ORDER
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.rows.shares import partition_of
from prefect_rlhf.placement.words.table import WORDS

NUMBERS_SHOWN = 8  # of an order of devices
_COLUMN = "micro_batches"  # a word with a column of its own
STEPS_LISTED = 2  # after step 0, if any; the first step differs: no training precedes it


def plan_rows(plan: ExecutionPlan, graph: DataflowGraph) -> list[dict[str, str]]:
    """Return a table row for each call: its kind, its devices, and how its rows are split.

    Unusual decisions have columns of their own, which are left out if empty.
    """
    rows = [_plan_row(call, plan, graph) | _decided(plan[call.name]) for call in graph]
    return [{title: row[title] for title in row if any(other[title] for other in rows)} for row in rows]


def plan_text(plan: ExecutionPlan, graph: DataflowGraph) -> str:
    """Return the plan as an aligned table.

    >>> print(table([{"call": "actor_generate", "mesh": "n0:0-1"}, {"call": "gae", "mesh": "n0:0"}]))
    call            mesh
    actor_generate  n0:0-1
    gae             n0:0
    """
    return table(plan_rows(plan, graph))


def graph_text(augmented: AugmentedGraph, num_steps: int = STEPS_LISTED) -> str:
    """List the nodes of the first steps in order, each with its dependencies and their reasons.

    A dependency is written `data <- node` or `version <- node`; dependencies that only keep an order come last. Rows of
    datasets come first, because no node waits for them.
    """
    datasets = {dataset.name for dataset in augmented.graph.datasets}
    lines: list[str] = []
    last = min(augmented.finished + num_steps, augmented.num_steps)
    first = min(augmented.finished + 1, last) if augmented.finished else 0
    for step in range(first, last + 1):
        lines += [line for node in augmented.of_step(step) for line in _node_lines(node, datasets)]
    left = augmented.num_steps - last
    return "\n".join([*lines, f"... and {left} more step{'s' * (left > 1)}"] if left > 0 else lines)


def _plan_row(call: Call, plan: ExecutionPlan, graph: DataflowGraph) -> dict[str, str]:
    placement = plan[call.name]
    return {
        "call": call.name,
        "runs": call.kind if call.every is None else f"{call.kind} every {call.every} steps",
        "role": call.role or "",
        "engine": placement.engine,
        "mesh": placement.mesh.name,
        **{
            axis: str(degree) if axis in ORDER or degree > 1 else ""
            for axis, degree in placement.strategy.degrees.items()
        },
        "rows": _rows(call, plan, graph),
        "mini-batches": str(call.mini_batches) if call.kind == "train_step" else "",
        "micro-batches": str(placement.micro_batches) if TRAITS[placement.engine].micro_batches else "",
    }


def _decided(placement: Placement) -> dict[str, str]:
    """The placement's unusual words, except those that have a column of their own."""
    values = {word: (word.of(placement), word.default) for name, word in WORDS.items() if name != _COLUMN}
    cells = {word.name: "" if value == default else _in_a_cell(value) for word, (value, default) in values.items()}
    cells["order"] = _in_a_cell(placement.device_order) if placement.device_order else ""
    return {name.replace("_", "-"): cell for name, cell in cells.items()}


def _in_a_cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if len(value) <= NUMBERS_SHOWN else f"of its own ({len(value)} devices)"
    return str(value)


def _rows(call: Call, plan: ExecutionPlan, graph: DataflowGraph) -> str:
    """The rows of a step; with each replica's rows if their speeds differ: `12 (8 4)`."""
    partition = partition_of(graph, plan, call.name)
    if len(set(partition.speeds)) == 1 or len(call.by_row_set) > 1:
        return " + ".join(str(part.num_rows) for part in call.by_row_set)
    counts = (sum(map(len, mini_batches)) for mini_batches in partition.partitions())
    return f"{call.num_rows} ({' '.join(map(str, counts))})"


def _node_lines(node: Node, datasets: Collection[str]) -> Iterator[str]:
    yield node.title
    for port in node.call.inputs if node.call else ():
        if port.source in datasets:
            yield f"    data <- dataset {port.source} ({', '.join(port.keys)})"
    order = ("data", "state", "order", "version", "overwrite", "memory")
    for dependency in sorted(node.dependencies, key=lambda d: order.index(d.kind)):
        label = f" ({dependency.label})" if dependency.label else ""
        yield f"    {dependency.kind} <- {dependency.node}{label}"
