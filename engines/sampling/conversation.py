"""A play's rows while an engine continues them, and plays in rounds: one generate for all waiting rows at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prefect_rlhf.engines.engine import Conversed, Generated, Order, PlayEnd, PlayTable, Turn
from prefect_rlhf.engines.sampling.seeds import play_seed
from prefect_rlhf.errors.errors import RlhfError


@dataclass(slots=True)
class PlayRow:
    """A play's row so far: everything after its prompt, and the seed of its draws."""

    prompt: Sequence[int]
    seed: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    end: PlayEnd | None = None

    @property
    def context(self) -> list[int]:
        """The tokens that the next turn continues."""
        return [*self.prompt, *self.tokens]

    def follow(self, turn: Turn) -> int:
        """Append the answer before a turn, or replace the prompt; return the turn's seed."""
        self._append(turn.answer, [0.0] * len(turn.answer), 0, turn.number - 1)
        if turn.prompt is not None:
            self.prompt = turn.prompt
        return play_seed(self.seed, turn.number)

    def said(self, number: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """Append a turn of the model."""
        self._append(tokens, logprobs, 1, number)

    def _append(self, tokens: Sequence[int], logprobs: Sequence[float], mask: int, turn: int) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.mask += [mask] * len(tokens)
        self.turns += [turn] * len(tokens)


def conversed(rows: Sequence[PlayRow], kept_masses: Sequence[tuple[float, int]]) -> Conversed:
    """Return the rows after their plays. `kept_masses` are means over tokens, each with its number of tokens.

    Raises RlhfError for a row with an unfinished play.
    """
    ends = [row.end for row in rows if row.end is not None]
    if len(ends) < len(rows):
        raise RlhfError(f"{len(rows) - len(ends)} plays have no end")
    total = sum(count for _, count in kept_masses)
    return Conversed(
        prompts=[row.prompt for row in rows],
        tokens=[row.tokens for row in rows],
        logprobs=[row.logprobs for row in rows],
        mask=[[0] * len(row.mask) if row.end is not None and row.end.failed else row.mask for row in rows],
        turns=[row.turns for row in rows],
        ends=ends,
        kept_mass=math.fsum(mass * count for mass, count in kept_masses) / total if total else None,
    )


def in_rounds(
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    table: PlayTable | None,
    share: Callable[[Sequence[Order] | None], Sequence[Order]],
    generate: Callable[[Sequence[Sequence[int]], Sequence[int], Sequence[int]], tuple[Generated, Sequence[bool]]],
) -> Conversed:
    """Play all rows turn by turn: each round waits for all environments, then continues all unfinished rows.

    `share` gives the leader's orders to every rank of the replica. `generate` continues prompts with their seeds and
    token limits, and returns which of them ended before their limit.
    """
    rows = [PlayRow(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]
    kept_masses: list[tuple[float, int]] = []
    while any(row.end is None for row in rows):
        orders = share(None if table is None else sorted(table.orders("all"), key=lambda order: order.row))
        turns = [order for order in orders if isinstance(order, Turn)]
        for end in (order for order in orders if isinstance(order, PlayEnd)):
            rows[end.row].end = end
        if not turns:
            continue
        turn_seeds = [rows[turn.row].follow(turn) for turn in turns]
        contexts = [rows[turn.row].context for turn in turns]
        made, stopped = generate(contexts, turn_seeds, [turn.at_most for turn in turns])
        if made.kept_mass is not None:
            kept_masses.append((made.kept_mass, sum(map(len, made.tokens))))
        for turn, tokens, logprobs, is_stopped in zip(turns, made.tokens, made.logprobs, stopped, strict=True):
            rows[turn.row].said(turn.number, tokens, logprobs)
            if table is not None:
                table.heard(turn.row, tokens, is_stopped)
    return conversed(rows, kept_masses)
