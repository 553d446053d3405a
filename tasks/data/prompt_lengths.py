"""Prompts that are longer than asked for: refused, left out, or cut at one end; how many is always said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prefect_rlhf.placement.errors import InvalidInput

OverlongPrompts = Literal["refuse", "drop", "keep_end", "keep_start"]


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """The most tokens of a prompt, and what becomes of longer ones."""

    most: int
    overlong: OverlongPrompts

    def kept(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the prompts that stay.

        >>> PromptLimit(4, "drop").kept([4, 5, 1])
        (0, 2)
        """
        return tuple(row for row, length in enumerate(lengths) if self.overlong != "drop" or length <= self.most)

    def cut(self, tokens: list[int]) -> list[int]:
        """Return a prompt's tokens, at most so many of them where the rest may be cut off.

        >>> PromptLimit(2, "keep_end").cut([1, 2, 3]), PromptLimit(2, "keep_start").cut([1, 2, 3])
        ([2, 3], [1, 2])
        """
        if self.overlong == "keep_end":
            return tokens[-self.most :]
        return tokens[: self.most] if self.overlong == "keep_start" else tokens

    def check(self, name: str, lengths: Sequence[int]) -> None:
        """Raise InvalidInput for a prompt that is longer and shall not be, or where none is left."""
        longer = [row for row, length in enumerate(lengths) if length > self.most]
        if longer and self.overlong == "refuse":
            expected = f"at most {self.most}, its max_prompt_length; overlong_prompts may drop or cut longer ones"
            raise InvalidInput(f"{name} row {longer[0]}", f"{lengths[longer[0]]} tokens", expected)
        if self.overlong == "drop" and len(longer) == len(lengths):
            expected = f"at least {min(lengths)}, the shortest prompt: all {len(lengths)} would be dropped"
            raise InvalidInput(f"{name}.max_prompt_length", self.most, expected)

    def remark(self, name: str, lengths: Sequence[int]) -> str:
        """Return a line that says how many prompts are not as they are stored."""
        longer = sum(length > self.most for length in lengths)
        done = "left out" if self.overlong == "drop" else f"cut to their {self.overlong.removeprefix('keep_')}"
        return f"{name}: {longer} of {len(lengths)} prompts are longer than {self.most} tokens and {done}"
