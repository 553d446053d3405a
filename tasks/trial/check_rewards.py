"""Check of reward functions before anything is built: each is imported in a process that can be ended."""

from collections.abc import Mapping

from prefect_rlhf.engines.commands import RowSource
from prefect_rlhf.engines.functions.pool import check_function
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.tasks.host_rewards import HostRewards


def check_rewards(graph: DataflowGraph, sources: Mapping[str, RowSource]) -> None:
    """Raise InvalidInput for a reward function that cannot be imported or called, or needs a column that rows lack."""
    checked = set()
    for call in graph:
        if call.on_hosts:
            columns = tuple(sources[call.rows.dataset].column_kinds)
            for function in HostRewards.model_validate_json(call.operation.settings).host_functions:
                if (function, columns) not in checked:
                    check_function(function, columns)
                checked.add((function, columns))
