"""Tries plays in a dry run: two rows are played twice against a made-up model that says the same both times.

A run that continues after a failure needs plays that repeat exactly, so a difference gives a warning with row and turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prefect_rlhf.engines.commands import RowSource
from prefect_rlhf.engines.rank.trial.plays import Trial
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.rows.tokenizers import Tokenizers
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer
from prefect_rlhf.tasks.play import Play

ROWS = 2


def try_plays(graph: DataflowGraph, sources: Mapping[str, RowSource], tokenizers: Tokenizers) -> list[str]:
    """Play two rows of each play twice; return a one-line warning for each play that fails or differs from itself.

    A row has at most 4 turns. A turn repeats words from the prompt, so a play that waits for a tool call ends early.
    Prompts come from the dataset, in the tokens of the role that plays. Raises InvalidInput for a function that is not
    a play.
    """
    warnings, tried = [], set()
    for call in graph:
        if call.play is None or call.role is None or (call.role, call.play.settings) in tried:
            continue
        tried.add((call.role, call.play.settings))
        source = sources[call.rows.dataset]
        rows = range(min(ROWS, len(source)))
        columns = {name: source.read_column(name, rows) for name in source.column_kinds}
        settings = Play.model_validate_json(call.play.settings).settings
        prompts = in_tokens_of(call.role, source.read(rows)["prompt_tokens"], tokenizers)
        reads = tokenizers.alike.get(call.role, call.role) == tokenizers.speaks
        of_source = (source.variables, source.eos_token) if reads else ({}, None)
        template = source.template if reads else tokenizers.templates.get(call.role)
        folder = tokenizers.folders[call.role]
        warnings += Trial(settings, columns, prompts, folder, *of_source, template).remarks()
    return warnings


def in_tokens_of(role: str, prompts: Sequence[Sequence[int]], tokenizers: Tokenizers) -> Sequence[Sequence[int]]:
    """Convert a dataset's prompts to the tokens of a role, which may have a tokenizer of its own."""
    if tokenizers.alike.get(role, role) == tokenizers.speaks:
        return prompts
    spoken, own = (load_tokenizer(tokenizers.folders[one]) for one in (tokenizers.speaks, role))
    return [own(spoken.decode(prompt, skip_special_tokens=True))["input_ids"] for prompt in prompts]
