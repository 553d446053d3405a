"""How the rows of a step are dealt to data-parallel replicas: by count, or by tokens once lengths are known.

Mini-batch m is rows [m*B/M, (m+1)*B/M) of the whole batch, so its rows do not depend on the plan; only which replica
works on which of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from prefect_rlhf.placement.errors import InvalidInput

RowIndices = tuple[int, ...]
Partitions = tuple[tuple[RowIndices, ...], ...]
"""hands[d][m] are the rows of mini-batch m that replica d works on, in ascending order."""


@dataclass(frozen=True, slots=True)
class RowPartition:
    """What decides which replica works on which rows: equal dealings of equal lengths give equal hands.

    Replica d gets work in proportion to `speeds[d]`. Groups of `rows_per_item` adjacent rows stay together.
    `lengths_of` names the generate whose rows' lengths balance it; None: it goes by count.
    """

    num_rows: int
    speeds: tuple[float, ...] = (1.0,)
    mini_batches: int = 1
    rows_per_item: int = 1
    lengths_of: str | None = None

    @property
    def dp(self) -> int:
        return len(self.speeds)

    @property
    def whole(self) -> bool:
        """Whether its one replica has all rows."""
        return self.dp == 1

    def hands(self, lengths: tuple[int, ...] | None = None) -> Partitions:
        """Deal: with each row's number of tokens where the dealing goes by tokens; without them by count.

        Raises InvalidInput when a mini-batch has fewer items than there are replicas, or is no whole number of items.

        >>> RowPartition(8, (1.0, 1.0), mini_batches=2).hands()
        (((0, 1), (4, 5)), ((2, 3), (6, 7)))
        >>> RowPartition(4, (1.0, 1.0), lengths_of="generate").hands((9, 2, 3, 2))
        (((0,),), ((1, 2, 3),))
        """
        return _hands(self, None if self.lengths_of is None else lengths)

    def items_per_mini_batch(self) -> int:
        """How many items a mini-batch has. Raises InvalidInput; see `hands`."""
        parts = self.mini_batches * self.rows_per_item
        if self.num_rows < 1 or self.num_rows % parts:
            what = f"a multiple of {parts} ({self.mini_batches} mini-batches of items of {self.rows_per_item} rows)"
            raise InvalidInput("num_rows", self.num_rows, what)
        if (items := self.num_rows // parts) < self.dp:
            raise InvalidInput("dp", self.dp, f"at most {items}, the items of a mini-batch")
        return items

    def tokens_of_items(self, lengths: Sequence[int] | None) -> list[int]:
        """Tokens of each item; 1 each where nothing is known."""
        width = self.rows_per_item
        if lengths is None:
            return [1] * (self.num_rows // width)
        assert len(lengths) == self.num_rows, f"{len(lengths)} lengths of {self.num_rows} rows"
        return [sum(lengths[i : i + width]) for i in range(0, self.num_rows, width)]

    def rows_of(self, items: Sequence[int]) -> RowIndices:
        """The rows of these items."""
        width = self.rows_per_item
        return tuple(row for item in items for row in range(item * width, (item + 1) * width))


@lru_cache(maxsize=64)  # every device of a call asks for its replica's
def _hands(dealing: RowPartition, lengths: tuple[int, ...] | None) -> Partitions:
    size, tokens = dealing.items_per_mini_batch(), dealing.tokens_of_items(lengths)
    dealt = []
    for start in range(0, size * dealing.mini_batches, size):
        hands = balance(tokens[start : start + size], dealing.speeds)
        dealt.append([dealing.rows_of([start + item for item in hand]) for hand in hands])
    return tuple(zip(*dealt, strict=True))


def balance(tokens: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Items to replicas, so that the last to finish finishes early: by count where that is as good, else longest first.

    By count first, since generate deals by count: rows stay where they are unless moving them pays.

    >>> deal([1, 1, 1, 1], (1.0, 1.0)), deal([5, 4, 1, 1], (1.0, 1.0)), deal([1] * 6, (1.0, 0.5))
    ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 1, 2, 3], [4, 5]])
    """
    in_order, longest_first = _by_count(len(tokens), speeds), _longest_first(tokens, speeds)
    return min(in_order, longest_first, key=lambda hands: _finish(hands, tokens, speeds))


def _finish(hands: Sequence[Sequence[int]], tokens: Sequence[int], speeds: Sequence[float]) -> float:
    return max(sum(tokens[i] for i in hand) / speed for hand, speed in zip(hands, speeds, strict=True))


@lru_cache(maxsize=1024)
def counts(num_items: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """How many items each replica gets by count: one each, and each further one where it would be done first.

    >>> counts(6, (1.0, 0.5)), counts(8, (1.0, 1.0, 1.0))
    ((4, 2), (3, 3, 2))
    """
    if len(set(speeds)) == 1:
        each, more = divmod(num_items, len(speeds))
        return tuple(each + (d < more) for d in range(len(speeds)))
    found = [1] * len(speeds)
    for _ in range(num_items - len(speeds)):
        first = min(range(len(speeds)), key=lambda d: ((found[d] + 1) / speeds[d], d))
        found[first] += 1
    return tuple(found)


def _by_count(num_items: int, speeds: Sequence[float]) -> list[list[int]]:
    """Consecutive items, as many to each replica as `counts` says."""
    dealt = counts(num_items, tuple(speeds))
    starts = [sum(dealt[:d]) for d in range(len(speeds))]
    return [list(range(start, start + count)) for start, count in zip(starts, dealt, strict=True)]


def _longest_first(tokens: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Graham's rule (1969): the longest item left goes to the replica that would be done with it first."""
    hands: list[list[int]] = [[] for _ in speeds]
    loads = [0] * len(speeds)
    order = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    for left, item in zip(range(len(tokens), 0, -1), order, strict=True):
        empty = [d for d, hand in enumerate(hands) if not hand]
        open_to = empty if left <= len(empty) else range(len(speeds))  # everyone gets at least one
        first = min(open_to, key=lambda d: ((loads[d] + tokens[item]) / speeds[d], d))
        hands[first].append(item)
        loads[first] += tokens[item]
    return [sorted(hand) for hand in hands]
