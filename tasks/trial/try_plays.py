"""Trial of plays in a dry run: two rows are played twice against a made-up model, which says the same both times.

A run that goes on after a failure needs plays that do the same again, so a difference is a warning, with row and turn.
"""

from __future__ import annotations

from collections.abc import Mapping

from prefect_rlhf.engines.commands import RowSource
from prefect_rlhf.engines.rank.trial.plays import Trial
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.tasks.play import Play

ROWS = 2


def try_plays(graph: DataflowGraph, sources: Mapping[str, RowSource], tokenizer: str) -> list[str]:
    """Play two rows of each play twice; return a warning, in a line, of each play that fails or differs from itself.

    A row has at most 4 turns. A turn repeats words of the prompt, so a play that waits for a call of a tool ends early.
    `tokenizer` is the folder of a tokenizer. Raises InvalidInput for a function that is no play.
    """
    warnings, tried = [], set()
    for call in graph:
        if call.play is None or call.play.settings in tried:
            continue
        tried.add(call.play.settings)
        source = sources[call.rows.dataset]
        rows = range(min(ROWS, len(source)))
        columns = {name: source.read_column(name, rows) for name in source.column_kinds}
        settings = Play.model_validate_json(call.play.settings).settings
        prompts, of_source = source.read(rows)["prompt_tokens"], (source.variables, source.eos_token)
        warnings += Trial(settings, columns, prompts, tokenizer, *of_source).remarks()
    return warnings
