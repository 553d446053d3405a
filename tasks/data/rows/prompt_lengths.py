"""Handles prompts above the length limit: they are refused, left out, or cut at one end, and the log counts them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.rows.row_checks import MeasuredRows

OverlongPrompts = Literal["refuse", "drop", "keep_end", "keep_start"]


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The longest allowed prompt in tokens, and what to do with longer prompts."""

    most: int
    overlong: OverlongPrompts

    def kept(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the prompts that are kept.

        >>> PromptLimit(4, "drop").kept([4, 5, 1])
        (0, 2)
        """
        return tuple(row for row, length in enumerate(lengths) if self.overlong != "drop" or length <= self.most)

    def cut(self, tokens: list[int]) -> list[int]:
        """Return a prompt's tokens, cut to `most` tokens if the setting allows it.

        >>> PromptLimit(2, "keep_end").cut([1, 2, 3]), PromptLimit(2, "keep_start").cut([1, 2, 3])
        ([2, 3], [1, 2])
        """
        if self.overlong == "keep_end":
            return tokens[-self.most :]
        return tokens[: self.most] if self.overlong == "keep_start" else tokens

    def check(self, name: str, rows: MeasuredRows) -> None:
        """Raise InvalidInput for a prompt above the limit if such prompts are refused, and if all prompts would be
        dropped.
        """
        longer = [row for row, length in enumerate(rows.lengths) if length > self.most]
        if longer and self.overlong == "refuse":
            expected = f"at most {self.most}, its max_prompt_length; overlong_prompts can drop or cut longer prompts"
            seen = f"{rows.lengths[longer[0]]} tokens"
            raise InvalidInput(f"{name} row {rows.item_of(longer[0])}", seen, expected)
        if self.overlong == "drop" and len(longer) == len(rows.lengths):
            shortest = min(rows.lengths)
            expected = f"at least {shortest}, the shortest prompt: all {len(longer)} would be dropped"
            raise InvalidInput(f"{name}.max_prompt_length", self.most, expected)

    def remark(self, name: str, lengths: Sequence[int]) -> str:
        """Return a line with the number of dropped or cut prompts; empty if all fit."""
        longer = sum(length > self.most for length in lengths)
        if not longer:
            return ""
        done = "left out" if self.overlong == "drop" else f"cut to their {self.overlong.removeprefix('keep_')}"
        return f"{name}: {longer} of {len(lengths)} prompts are longer than {self.most} tokens and {done}"
