"""Checks plays before any model is built: each is imported in a separate process that can be killed."""

from prefect_rlhf.engines.functions.plays.pool import check_play
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.tasks.play import Play


def check_play_functions(graph: DataflowGraph) -> None:
    """Raise InvalidInput for a play function that cannot be imported or called."""
    for settings in dict.fromkeys(call.play.settings for call in graph if call.play is not None):
        play = Play.model_validate_json(settings)
        if not play.shows_tools:  # else it was imported to show the tools
            check_play(play.settings)
