"""Measures the lengths of many rows, chunk by chunk to save memory. A long check reports its progress."""

import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Say = Callable[[str], None]
TokensOf = Callable[[Sequence[int]], Iterable[Sequence[int]]]

CHUNK = 8192  # items: enough work for all threads of a tokenizer, and some 10 MB of tokens
QUIET_SECONDS = 10.0  # between two lines of a long check


@dataclass(frozen=True, slots=True)
class MeasuredRows:
    """The length of each row in tokens, in order, and the highest token id with its item."""

    items: Sequence[int]
    lengths: Sequence[int]
    highest_token: int
    highest_item: int

    def item_of(self, row: int) -> int:
        """Return the item of a row; an item has one row or several."""
        return self.items[row * len(self.items) // len(self.lengths)]


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """Checked rows as they will be read: each row's tokens, and log lines on changes made to them."""

    lengths: Sequence[int]
    remarks: tuple[str, ...]

    @property
    def longest(self) -> int:
        """The length of the longest row in tokens."""
        return max(self.lengths)


def silent(line: str) -> None:
    """Discard the line."""


def measure(name: str, items: Sequence[int], tokens_of: TokensOf, say: Say) -> MeasuredRows:
    """Measure the rows of a dataset's items; `tokens_of` checks the items of a chunk and returns their rows' tokens."""
    begin = said = time.monotonic()
    lengths, highest = array("I"), (-1, 0)
    for at in range(0, len(items), CHUNK):
        chunk = items[at : at + CHUNK]
        rows = list(tokens_of(chunk))
        tops = [max(tokens) for tokens in rows]
        lengths.extend(map(len, rows))
        highest = max(
            highest, (max(tops), chunk[tops.index(max(tops)) * len(chunk) // len(rows)]), key=lambda top: top[0]
        )
        now, done = time.monotonic(), at + len(chunk)
        if now - said > QUIET_SECONDS and done < len(items):
            left = (now - begin) / done * (len(items) - done)
            say(f"{name}: {done:,} of {len(items):,} items checked in {now - begin:.0f} s, about {left:.0f} s left")
            said = now
    return MeasuredRows(items, lengths, *highest)
