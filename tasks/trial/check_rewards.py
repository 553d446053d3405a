"""Check of reward functions and plays before anything is built: each is imported in a process that can be ended."""

from collections.abc import Mapping

from prefect_rlhf.engines.commands import RowSource
from prefect_rlhf.engines.functions.plays.pool import check_play
from prefect_rlhf.engines.functions.pool import check_function
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.play import Play


def check_rewards(graph: DataflowGraph, sources: Mapping[str, RowSource]) -> None:
    """Raise InvalidInput for a reward function that cannot be imported or called, or needs a column that rows lack.

    And for a play function that cannot be imported or called.
    """
    checked = set()
    for settings in dict.fromkeys(call.play.settings for call in graph if call.play is not None):
        play = Play.model_validate_json(settings)
        if not play.shows_tools:  # else it was imported to show the tools
            check_play(play.settings)
    for call in graph:
        if call.on_hosts:
            columns = tuple(sources[call.rows.dataset].column_kinds)
            for function in HostRewards.model_validate_json(call.operation.settings).host_functions:
                if (function, columns) not in checked:
                    check_function(function, columns)
                checked.add((function, columns))
