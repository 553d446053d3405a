"""The partition of a step's rows over data-parallel replicas: by count, or by tokens once lengths are known.

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
"""partitions[d][m] are the rows of mini-batch m that replica d works on, in ascending order."""


@dataclass(frozen=True, slots=True)
class RowPartition:
    """A rule for who works on which rows: equal rules and equal lengths give equal partitions.

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

    def partitions(self, lengths: tuple[int, ...] | None = None) -> Partitions:
        """Partition the rows: by each row's number of tokens where the rule goes by tokens; without them by count.

        Raises InvalidInput when a mini-batch has fewer items than there are replicas, or is no whole number of items.

        >>> RowPartition(8, (1.0, 1.0), mini_batches=2).partitions()
        (((0, 1), (4, 5)), ((2, 3), (6, 7)))
        >>> RowPartition(4, (1.0, 1.0), lengths_of="generate").partitions((9, 2, 3, 2))
        (((0,),), ((1, 2, 3),))
        """
        return _partitions(self, None if self.lengths_of is None else lengths)


def balance(tokens: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Give items to replicas, so that the last to finish finishes early: by count where that is as good as any.

    By count first, since generate goes by count: rows stay where they are unless moving them pays. Else the longest
    first.

    >>> balance([1, 1, 1, 1], (1.0, 1.0)), balance([5, 4, 1, 1], (1.0, 1.0)), balance([1] * 6, (1.0, 0.5))
    ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 1, 2, 3], [4, 5]])
    """

    def finish(parts: Sequence[Sequence[int]]) -> float:
        return max(sum(tokens[i] for i in part) / speed for part, speed in zip(parts, speeds, strict=True))

    return min(_by_count(len(tokens), speeds), _longest_first(tokens, speeds), key=finish)


@lru_cache(maxsize=1024)
def counts(num_items: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
    """Return the number of items of each replica by count: one each, each further one where it would be done first.

    >>> counts(6, (1.0, 0.5)), counts(8, (1.0, 1.0, 1.0))
    ((4, 2), (3, 3, 2))
    """
    if len(set(speeds)) == 1:
        each, more = divmod(num_items, len(speeds))
        return tuple(each + (d < more) for d in range(len(speeds)))
    items = [1] * len(speeds)
    for _ in range(num_items - len(speeds)):
        first = min(range(len(speeds)), key=lambda d: ((items[d] + 1) / speeds[d], d))
        items[first] += 1
    return tuple(items)


@lru_cache(maxsize=64)  # every device of a call asks for its replica's
def _partitions(rule: RowPartition, lengths: tuple[int, ...] | None) -> Partitions:
    width, size = rule.rows_per_item, _items_per_mini_batch(rule)
    if lengths is None:
        tokens = [1] * (rule.num_rows // width)  # of each item
    else:
        assert len(lengths) == rule.num_rows, f"{len(lengths)} lengths of {rule.num_rows} rows"
        tokens = [sum(lengths[row : row + width]) for row in range(0, rule.num_rows, width)]
    by_mini_batch = []
    for start in range(0, size * rule.mini_batches, size):
        parts = balance(tokens[start : start + size], rule.speeds)
        items = [[start + item for item in part] for part in parts]
        by_mini_batch.append(
            [tuple(row for item in part for row in range(item * width, (item + 1) * width)) for part in items]
        )
    return tuple(zip(*by_mini_batch, strict=True))


def _items_per_mini_batch(rule: RowPartition) -> int:
    parts = rule.mini_batches * rule.rows_per_item
    if rule.num_rows < 1 or rule.num_rows % parts:
        right = f"a multiple of {parts} ({rule.mini_batches} mini-batches of items of {rule.rows_per_item} rows)"
        raise InvalidInput("num_rows", rule.num_rows, right)
    if (items := rule.num_rows // parts) < rule.dp:
        raise InvalidInput("dp", rule.dp, f"at most {items}, the items of a mini-batch")
    return items


def _by_count(num_items: int, speeds: Sequence[float]) -> list[list[int]]:
    """Give each replica consecutive items, as many as `counts` says."""
    items = counts(num_items, tuple(speeds))
    starts = [sum(items[:d]) for d in range(len(speeds))]
    return [list(range(start, start + count)) for start, count in zip(starts, items, strict=True)]


def _longest_first(tokens: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """Give the longest item left to the replica that would be done with it first (Graham's rule, 1969)."""
    parts: list[list[int]] = [[] for _ in speeds]
    loads = [0] * len(speeds)
    by_length = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    for left, item in zip(range(len(tokens), 0, -1), by_length, strict=True):
        empty = [d for d, part in enumerate(parts) if not part]
        open_to = empty if left <= len(empty) else range(len(speeds))  # everyone gets at least one
        first = min(open_to, key=lambda d: ((loads[d] + tokens[item]) / speeds[d], d))
        parts[first].append(item)
        loads[first] += tokens[item]
    return [sorted(part) for part in parts]
