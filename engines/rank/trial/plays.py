"""Plays the same rows twice against a made-up model that says the same both times, and finds the first difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from prefect_rlhf.engines.engine import Conversed, Generated, PlaySettings
from prefect_rlhf.engines.functions.plays.messages import Failed
from prefect_rlhf.engines.functions.plays.pool import PlayPool
from prefect_rlhf.engines.functions.plays.table import Table
from prefect_rlhf.engines.sampling.answer_tokens import AnswerTokens
from prefect_rlhf.engines.sampling.conversation import in_rounds
from prefect_rlhf.errors.in_short import in_short

TURNS = 4
LONGEST = 8
"""Tokens of a made-up turn, if the play may have that many."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Rows to play: their settings, their prompts, and the folder of a tokenizer.

    `columns` are the rows of a dataset as plain values, by name; `variables`, `eos_token` and `template` are
    its settings too.
    """

    settings: PlaySettings
    columns: Mapping[str, Sequence[object]]
    prompts: Sequence[Sequence[int]]
    tokenizer: str
    variables: Mapping[str, object] = field(default_factory=dict)
    eos_token: str | None = None
    template: str | None = None

    def remarks(self) -> list[str]:
        """Play the rows twice; return a line if a play fails or differs from itself. At most 4 turns are played.

        Raises InvalidInput for a function that is not a play.
        """
        turns = min(self.settings.max_turns, TURNS)
        settings = replace(self.settings, most_failed=1.0, retries=0, workers=1, max_turns=turns)
        if settings.signature != "play":  # the model would read the error, and nobody else
            settings = replace(settings, tool_errors="fail")
        bounds = settings.max_answer_tokens, settings.overlong_answers
        codec = AnswerTokens(self.tokenizer, *bounds, self.variables, self.eos_token, self.template)
        rows = _rows(self.columns, self.prompts, codec)
        with closing(PlayPool(settings)) as pool:
            first, second = (_played(pool, rows, codec, self.prompts) for _ in range(2))
        name = f"play {settings.function}"
        if failed := next(iter(first.failures or second.failures), None):
            return [f"{name} failed on made-up turns, and may fail on real turns; row {failed.play}: {failed.reason}"]
        if difference := _difference(first.rows, second.rows, codec.text):
            return [f"{name} differs from itself, so a resumed run would be another run: {difference}"]
        return []


@dataclass(frozen=True, slots=True)
class Played:
    """Rows after they were played, and the plays that failed."""

    rows: Conversed
    failures: tuple[Failed, ...]


def _rows(
    columns: Mapping[str, Sequence[object]], prompts: Sequence[Sequence[int]], codec: AnswerTokens
) -> list[dict[str, object]]:
    numbers = range(len(prompts))
    texts = [codec.text(prompt) for prompt in prompts]
    whole: dict[str, Sequence[object]] = {"prompt": texts, **columns, "seed": numbers, "group_seed": numbers}
    return [dict(zip(whole, values, strict=True)) for values in zip(*whole.values(), strict=True)]


def _played(
    pool: PlayPool, rows: Sequence[Mapping[str, object]], codec: AnswerTokens, prompts: Sequence[Sequence[int]]
) -> Played:
    most = LONGEST + 1  # so that the model ends its turns itself, and tools are called
    table = Table(pool, rows, codec, most, "a trial", prompts=prompts)
    conversed = in_rounds(prompts, range(len(rows)), table, lambda orders: orders or (), _made_up)
    return Played(conversed, tuple(table.failures))


def _made_up(
    contexts: Sequence[Sequence[int]], seeds: Sequence[int], most: Sequence[int]
) -> tuple[Generated, list[bool]]:
    """Continue each context by tokens of it, from a place that follows from its length."""
    lengths = [min(LONGEST, at_most) for at_most in most]
    starts = [len(context) // 2 for context in contexts]
    tokens = [
        ([*context] * (length + 1))[start : start + length]
        for context, length, start in zip(contexts, lengths, starts, strict=True)
    ]
    stopped = [length < at_most for length, at_most in zip(lengths, most, strict=True)]
    return Generated(tokens, [[0.0] * length for length in lengths]), stopped


def _difference(one: Conversed, other: Conversed, text: Callable[[Sequence[int]], str]) -> str:
    """Return the first row and turn that differ, with both answers or ends; empty if there is no difference."""
    for row in range(len(one.tokens)):
        if one.prompts[row] != other.prompts[row]:
            return f"row {row}, before its first turn: the environment opens with other text"
        first, second = _answers(one, row), _answers(other, row)
        for turn, answers in enumerate(zip_longest(first, second)):
            seen = ["its end" if answer is None else in_short(text(answer)) for answer in answers]
            if answers[0] != answers[1]:
                return f"row {row}, turn {turn}: {seen[0]} follows, and the second time {seen[1]}"
        ends = [(end.score, end.rewards, dict(end.numbers)) for end in (one.ends[row], other.ends[row])]
        if repr(ends[0]) != repr(ends[1]):  # NaN is equal to itself here
            turn = len(one.ends[row].rewards) - 1
            scores = [_end(*end) for end in ends]
            return f"row {row}, turn {turn}: {scores[0]} at its end, and the second time {scores[1]}"
    return ""


def _end(score: float, rewards: Sequence[float], numbers: Mapping[str, float]) -> str:
    return f"score {score:g}, rewards of turns {in_short(list(rewards))}, numbers {in_short(dict(numbers))}"


def _answers(said: Conversed, row: int) -> list[list[int]]:
    """Return the tokens of a row's answers, which each turn but the last has; an answer may have no token."""
    answers: list[list[int]] = [[] for _ in said.ends[row].rewards[1:]]
    for token, own, turn in zip(said.tokens[row], said.mask[row], said.turns[row], strict=True):
        if not own:
            answers[turn].append(token)
    return answers
