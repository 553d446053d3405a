"""Divides a step's rows over data-parallel replicas: by count, or by tokens once lengths are known.

Mini-batch m of M consists of items [floor(m*I/M), floor((m+1)*I/M)) of the batch's I items, so its rows do not depend
on the plan; only their assignment to replicas does. A replica may have no item of a mini-batch, or no item at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

from prefect_rlhf.errors.errors import InvalidInput

RowIndices = tuple[int, ...]
Partitions = tuple[tuple[RowIndices, ...], ...]
"""partitions[d][m] are the rows of mini-batch m that replica d works on, in ascending order."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index`, from 0, of the `of` equal parts into which a plan cuts a call's rows, by whole groups.

    >>> str(Part(1, 4)), Part(1, 4).within(8)
    ('part 2 of 4', slice(2, 4, None))
    """

    index: int = 0
    of: int = 1

    def __str__(self) -> str:
        return f"part {self.index + 1} of {self.of}"

    def within(self, count: int) -> slice:
        """Return this part's share of `count` consecutive pieces, which are divided equally among the parts."""
        assert count % self.of == 0, f"{count} pieces in {self.of} parts"
        return slice(self.index * count // self.of, (self.index + 1) * count // self.of)

    def meets(self, other: Part) -> bool:
        """Whether two parts of the same rows overlap.

        >>> [Part(i, 4).meets(Part(1, 2)) for i in range(4)]
        [False, False, True, True]
        """
        return (
            self.index * other.of < (other.index + 1) * self.of and other.index * self.of < (self.index + 1) * other.of
        )


WHOLE = Part()


@dataclass(frozen=True, slots=True)
class RowPartition:
    """A rule that assigns rows to replicas: equal rules and equal lengths give equal partitions."""

    num_rows: int
    speeds: tuple[float, ...] = (1.0,)
    """Replica d gets work in proportion to `speeds[d]`."""
    mini_batches: int = 1
    rows_per_item: int = 1
    """Adjacent rows that stay together."""
    lengths_of: str | None = None
    """The generate whose reported lengths balance the rows; None balances their number."""
    kept_by: str | None = None
    """The call that selects up to `num_rows` rows; None keeps all."""

    def __hash__(self) -> int:
        """Leave out most speeds: plans of many devices have many, and ask for this millions of times."""
        return hash((self.num_rows, len(self.speeds), self.mini_batches, self.lengths_of, self.kept_by))

    @property
    def dp(self) -> int:
        return len(self.speeds)

    @property
    def whole(self) -> bool:
        """Whether a single replica has all (kept) rows."""
        return self.dp == 1

    def partitions(self, lengths: tuple[int, ...] | None = None, kept: RowIndices | None = None) -> Partitions:
        """Partition the rows: by each row's number of tokens if the rule goes by tokens; without lengths, by count.

        `kept` are the existing rows, in order; the default is rows 0 to num_rows - 1. Raises InvalidInput if rows are
        not a whole number of items, or have fewer items than mini-batches.

        >>> RowPartition(8, (1.0, 1.0), mini_batches=2).partitions()
        (((0, 1), (4, 5)), ((2, 3), (6, 7)))
        >>> RowPartition(5, (1.0, 1.0, 1.0), mini_batches=2).partitions()
        (((0,), (2,)), ((1,), (3,)), ((), (4,)))
        >>> RowPartition(4, (1.0, 1.0), lengths_of="generate").partitions((9, 2, 3, 2))
        (((0,),), ((1, 2, 3),))
        >>> RowPartition(4, (1.0, 1.0), mini_batches=2, kept_by="kept").partitions(kept=(5, 2, 3))
        (((5,), (2,)), ((), (3,)))
        """
        return _partitions(self, None if self.lengths_of is None else lengths, None if self.kept_by is None else kept)


def balance(
    tokens: Sequence[int], speeds: Sequence[float], tokens_before: Sequence[int] | None = None
) -> list[list[int]]:
    """Assign items to replicas so that the last replica finishes early: by count if that is equally good.

    Assignment by count is tried first, because generate uses it, so rows stay in place unless moving them saves time.
    Otherwise the longest items are assigned first. Of equally good replicas, the replica with the fewest
    `tokens_before` (of earlier mini-batches) is chosen.

    >>> balance([1, 1, 1, 1], (1.0, 1.0)), balance([5, 4, 1, 1], (1.0, 1.0)), balance([1] * 6, (1.0, 0.5))
    ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[0, 1, 2, 3], [4, 5]])
    >>> balance([7], (1.0, 1.0), tokens_before=(5, 4))
    [[], [0]]
    """
    before = tuple(tokens_before or (0,) * len(speeds))
    if len(set(tokens)) <= 1:  # as in a plan's rows, whose lengths are unknown
        return _by_count(len(tokens), speeds, before)

    def finish(parts: Sequence[Sequence[int]]) -> float:
        return max(sum(tokens[i] for i in part) / speed for part, speed in zip(parts, speeds, strict=True))

    return min(_by_count(len(tokens), speeds, before), _longest_first(tokens, speeds, before), key=finish)


@lru_cache(maxsize=1024)
def counts(num_items: int, speeds: tuple[float, ...], tokens_before: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return each replica's number of items if they are divided by count: each item goes to the replica that finishes
    it first.

    Of equally good replicas, the replica with the fewest `tokens_before` (of earlier mini-batches) is chosen.

    >>> counts(6, (1.0, 0.5)), counts(8, (1.0, 1.0, 1.0)), counts(1, (1.0, 1.0)), counts(3, (1.0, 1.0), (9, 8))
    ((4, 2), (3, 3, 2), (1, 0), (1, 2))
    """
    before = tokens_before or (0,) * len(speeds)
    replicas = sorted(range(len(speeds)), key=lambda d: (before[d] / speeds[d], d))
    if len(set(speeds)) == 1:
        each, more = divmod(num_items, len(speeds))
        items = [each] * len(speeds)
        for d in replicas[:more]:
            items[d] += 1
        return tuple(items)
    items = [0] * len(speeds)
    for _ in range(num_items):
        items[min(replicas, key=lambda d: (items[d] + 1) / speeds[d])] += 1
    return tuple(items)


@lru_cache(maxsize=64)  # every device of a call asks for its replica's
def _partitions(rule: RowPartition, lengths: tuple[int, ...] | None, kept: RowIndices | None) -> Partitions:
    width = rule.rows_per_item
    if rule.num_rows < 1 or rule.num_rows % width:
        raise InvalidInput("num_rows", rule.num_rows, f"a multiple of {width}, the rows of an item")
    if (items := rule.num_rows // width) < rule.mini_batches:
        raise InvalidInput("mini_batches", rule.mini_batches, f"at most {items}, the items of a step")
    rows = range(rule.num_rows) if kept is None else kept
    assert len(rows) <= rule.num_rows and len(rows) % width == 0, f"{len(rows)} rows of {rule}"
    rows_of = [rows[start : start + width] for start in range(0, len(rows), width)]  # each item
    assert kept is not None or lengths is None or len(lengths) == rule.num_rows, f"{len(lengths)} lengths of {rule}"
    tokens = [1 if lengths is None else sum(lengths[row] for row in item) for item in rows_of]
    by_mini_batch, before = [], [0] * rule.dp
    for start, stop in pairwise(mini_batch_bounds(len(tokens), rule.mini_batches)):
        parts = balance(tokens[start:stop], rule.speeds, before)
        dealt = [[start + item for item in part] for part in parts]
        before = [done + sum(tokens[item] for item in part) for done, part in zip(before, dealt, strict=True)]
        by_mini_batch.append([tuple(row for item in part for row in rows_of[item]) for part in dealt])
    return tuple(zip(*by_mini_batch, strict=True))


def mini_batch_bounds(num_items: int, mini_batches: int) -> list[int]:
    """Return the start of each mini-batch and the end of the last; sizes differ by at most one item.

    k times as many mini-batches have these bounds too, so coarse mini-batches consist of whole fine mini-batches.

    >>> mini_batch_bounds(7, 2), mini_batch_bounds(7, 4)
    ([0, 3, 7], [0, 1, 3, 5, 7])
    """
    return [m * num_items // mini_batches for m in range(mini_batches + 1)]


def _by_count(num_items: int, speeds: Sequence[float], before: tuple[int, ...]) -> list[list[int]]:
    """Give each replica consecutive items, as many as `counts` says."""
    stops = list(accumulate(counts(num_items, tuple(speeds), before)))
    return [list(range(start, stop)) for start, stop in pairwise([0, *stops])]


def _longest_first(tokens: Sequence[int], speeds: Sequence[float], before: Sequence[int]) -> list[list[int]]:
    """Give the longest item left to the replica that would be done with it first (Graham's rule, 1969)."""
    parts: list[list[int]] = [[] for _ in speeds]
    loads = [0] * len(speeds)
    for item in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        first = min(range(len(speeds)), key=lambda d: ((loads[d] + tokens[item]) / speeds[d], before[d] / speeds[d], d))
        parts[first].append(item)
        loads[first] += tokens[item]
    return [sorted(part) for part in parts]
