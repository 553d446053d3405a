"""A generate with a play on a rank: the rows that plays see, the engine's call, and the resulting columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.engines.commands import CallCommand, RowSource
from prefect_rlhf.engines.engine import Conversed, PlayEnd, PlayingEngine, PlaySettings
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.plays.table import Table
from prefect_rlhf.engines.sampling.answer_tokens import AnswerTokens
from prefect_rlhf.engines.sampling.seeds import group_seeds, row_seeds

MOST_NAMES = 256
"""Names of the numbers that the plays of a call return; a row has fewer, but names may differ by row."""


@lru_cache(maxsize=8)
def pool_of(settings: PlaySettings) -> PlayPool:
    """Return this process's pool of plays; the workers end with the process."""
    return PlayPool(settings)


@dataclass(frozen=True, slots=True)
class Played:
    """The columns of a call's rows by key, its metrics, and how many rows, answers or tokens each is a mean over."""

    columns: Mapping[str, Sequence[Tensor]]
    metrics: Mapping[str, float]
    metric_rows: Mapping[str, int]


def play_rows(
    command: CallCommand, engine: PlayingEngine, prompts: Sequence[Sequence[int]], datasets: Mapping[str, RowSource]
) -> Played:
    """Play this replica's rows. Raises PlaysFailed, and InvalidInput for a function that is not a play."""
    assert command.play is not None and command.sampling is not None  # a generate with a play has both
    seeds, table = row_seeds(command), None
    if engine.leads:
        source = datasets.get(command.call.rows.dataset)
        pool, codec = pool_of(command.play), answer_tokens(command, source)
        rows = plain_rows(command, prompts, seeds, datasets, codec)
        table = Table(pool, rows, codec, command.sampling.max_new_tokens, command.doing, prompts=prompts)
    try:
        together = command.play.together
        said = engine.converse(prompts, command.sampling, seeds, table, command.micro_batches, together=together)
    except BaseException:
        if table is not None:
            pool_of(command.play).close()
        raise
    means = means_over_rows(said)
    return Played(
        columns_of(said),
        {name: mean for name, (mean, _) in means.items()},
        {name: number for name, (_, number) in means.items()},
    )


def answer_tokens(command: CallCommand, source: RowSource | None) -> AnswerTokens:
    """Return the converter between text and tokens for the call's plays, with the playing role's tokenizer.

    If that role reads the dataset, the settings are the same as for reading its prompts.
    """
    play, role, tokenizers = command.play, command.call.role, command.tokenizers
    assert play is not None and role is not None
    reads = tokenizers.alike.get(role, role) == tokenizers.speaks
    of_prompts: tuple[Any, ...] = (None, None, tokenizers.templates.get(role))
    if source is not None and reads:
        of_prompts = (source.variables, source.eos_token, source.template)
    return AnswerTokens(tokenizers.folders[role], play.max_answer_tokens, play.overlong_answers, *of_prompts)


def plain_rows(
    command: CallCommand,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    datasets: Mapping[str, RowSource],
    codec: AnswerTokens,
) -> list[dict[str, Any]]:
    """Return each row as plain values: every column of its dataset, `prompt`, `seed` and `group_seed`.

    `prompt` is the dataset's; a prompt made by an earlier call is its text, as the model reads it.
    """
    texts = {"prompt": [codec.text(prompt) for prompt in prompts]}
    columns: dict[str, Sequence[Any]] = {**texts}
    source = datasets.get(command.call.rows.dataset)
    if source is not None:
        columns |= {name: source.read_column(name, command.row_ids) for name in source.column_kinds}
    if not any(port.source in datasets for port in command.call.inputs):
        columns |= texts
    columns |= {"seed": seeds, "group_seed": group_seeds(command)}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def columns_of(said: Conversed) -> dict[str, list[Tensor]]:
    """Return the columns that a generate with a play makes."""
    return {
        "tokens": [torch.tensor([*prompt, *row]) for prompt, row in zip(said.prompts, said.tokens, strict=True)],
        "prompt_length": [torch.tensor(len(prompt)) for prompt in said.prompts],
        "logprobs": [torch.tensor(row, dtype=torch.float32) for row in said.logprobs],
        "mask": [torch.tensor(row, dtype=torch.uint8) for row in said.mask],
        "turn": [torch.tensor(row, dtype=torch.int16) for row in said.turns],
        "turn_rewards": [torch.tensor(end.rewards, dtype=torch.float32) for end in said.ends],
        "scores": [torch.tensor(end.score, dtype=torch.float32) for end in said.ends],
        "truncated": [torch.tensor(end.truncated, dtype=torch.uint8) for end in said.ends],
    }


def means_over_rows(said: Conversed) -> dict[str, tuple[float, int]]:
    """Return the mean, and the number of rows, of turns, tokens, failures and the plays' other numbers.

    A number that a play did not return does not count in its mean. `answer_seconds` is a mean over answers; it is left
    out if there are no answers. `kept_mass` is a mean over the model's own tokens. Rows may have different numbers: of
    more than MOST_NAMES names only the first are kept, and `play/names_left_out` counts the others.
    """
    ends = said.ends
    names = names_of(ends)
    own = [sum(row) for row in said.mask]
    values: dict[str, Sequence[float]] = {
        "turns": [len(end.rewards) for end in ends],
        "own_tokens": own,
        "observed_tokens": [len(row) - num_own for row, num_own in zip(said.tokens, own, strict=True)],
        "failed": [end.failed for end in ends],
        "truncated": [end.truncated for end in ends],
        **{f"play/{name}": [end.numbers[name] for end in ends if name in end.numbers] for name in names[:MOST_NAMES]},
    }
    if len(names) > MOST_NAMES:
        values["play/names_left_out"] = [len(names) - MOST_NAMES] * len(ends)
    means = {name: (sum(numbers) / max(len(numbers), 1), len(numbers)) for name, numbers in values.items()}
    answers = sum(end.answers for end in ends)
    if answers:
        means["answer_seconds"] = sum(end.answer_seconds for end in ends) / answers, answers
    if said.kept_mass is not None:  # else replicas would count by all tokens, an environment's too
        means["kept_mass"] = said.kept_mass, sum(own)
    return means


def names_of(ends: Sequence[PlayEnd]) -> list[str]:
    """Return the names of the numbers that plays returned, sorted."""
    return sorted({name for end in ends for name in end.numbers})
