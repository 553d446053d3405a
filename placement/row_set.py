"""The rows of a step that calls work on, and where they come from, which decides which calls' rows belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod


@dataclass(frozen=True, slots=True)
class RowCount:
    """A number of rows in a step: memory uses `at_most`, times use `expected`."""

    at_most: int
    expected: int


@dataclass(frozen=True, slots=True)
class RowLimit:
    """How long a row made by a computation may be: `longest` tokens, or `max_new_tokens` more than the inputs' longest
    row.

    >>> RowLimit(longest=64).of(20), RowLimit(max_new_tokens=6).of(20)
    (64, 26)
    """

    longest: int | None = None
    max_new_tokens: int = 0

    def of(self, longest_input: int) -> int:
        """Return the most tokens that a row may have, if the longest input row has `longest_input` tokens."""
        return self.longest if self.longest is not None else longest_input + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a row set a select keeps.

    It keeps groups from the first on. A group is the rows made from the same row, or the rows of a dataset's item.
    """

    num_rows: int
    """It selects from so many rows."""
    group_size: int
    """The most rows of a group."""
    at_most: int
    """The most groups that it keeps."""
    expected: int
    """The groups that time estimates assume."""
    per_group: int | None = None
    """Rows that it keeps of each; None means any number."""

    @property
    def count(self) -> RowCount:
        """How many rows are kept."""
        each = self.per_group or self.group_size
        return RowCount(self.at_most * each, self.expected * each)

    def kept(self, places: Sequence[float], rows: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the kept rows, group by group in the order of their numbers.

        In a group, rows with a place above 0 can be kept: the lowest place first, then the lowest number. With
        `per_group`, that many rows of a group are kept, or no row if the group has fewer. A Boolean is a place: True is
        1. NaN is not kept.

        >>> pairs = Choice(num_rows=8, group_size=4, at_most=2, expected=2, per_group=2)
        >>> pairs.kept([2, 0, 1, 0, 0, 1, 0, 0], range(8), [0, 0, 0, 0, 1, 1, 1, 1])
        (2, 0)
        """
        members: dict[int, list[tuple[float, int]]] = {}
        for place, row, group in zip(places, rows, groups, strict=True):
            if place > 0:
                members.setdefault(group, []).append((place, row))
        least = self.per_group or 1
        whole = (sorted(members[group])[: self.per_group] for group in sorted(members) if len(members[group]) >= least)
        return tuple(row for group in islice(whole, self.at_most) for _, row in group)


@dataclass(frozen=True, slots=True)
class RowSet:
    """A batch of a dataset, `samples` rows made from each row of `parent`, or a `choice` among the parent's rows.

    Rows are numbered from 0 in each step and keep their numbers. Rows r * samples to (r + 1) * samples - 1 are made
    from row r of the parent. Selected rows keep the parent's numbers.
    """

    name: str
    """The call that makes or selects the rows, or the dataset, with a suffix that distinguishes its batches."""
    dataset: str
    samples: int = 1
    """Of a dataset's batch, the rows per item: 2 for a pair."""
    parent: RowSet | None = None
    choice: Choice | None = None

    @property
    def lineage(self) -> Iterator[RowSet]:
        """This row set and its ancestors, up to the dataset's batch."""
        rows: RowSet | None = self
        while rows is not None:
            yield rows
            rows = rows.parent

    @property
    def base(self) -> RowSet:
        """The earliest row set of its lineage with exactly one row for each of these rows."""
        rows = self
        while rows.parent is not None and rows.samples == 1 and rows.choice is None:
            rows = rows.parent
        return rows

    @property
    def numbered(self) -> RowSet:
        """The row set that these rows' numbers refer to: itself, or the row set that a select took them from."""
        rows = self
        while rows.choice is not None and rows.parent is not None:
            rows = rows.parent
        return rows

    @property
    def choices(self) -> tuple[RowSet, ...]:
        """The selected row sets of its lineage. Their rows are known only after the selecting calls have run."""
        return tuple(rows for rows in self.lineage if rows.choice is not None)

    @property
    def group_size(self) -> int:
        """The largest number of rows made from the same row, or from the same item."""
        if self.choice is not None:
            return self.choice.per_group or self.choice.group_size
        return self.base.group_size if self.base is not self else self.samples

    @property
    def adjacent(self) -> int:
        """How many adjacent rows belong to the same group; 1 if a select keeps any number of each group."""
        choice = self.base.choice
        return self.group_size if choice is None else choice.per_group or 1

    def may_read(self, other: RowSet) -> bool:
        """Whether each of these rows corresponds to a row of `other`.

        True for the same rows, for their ancestors, and for row sets that correspond to either row by row.

        >>> prompts = RowSet("prompts", "prompts")
        >>> group, baseline = RowSet("group", "prompts", 4, prompts), RowSet("baseline", "prompts", 1, prompts)
        >>> group.may_read(prompts), group.may_read(baseline), baseline.may_read(group)
        (True, True, False)
        """
        return any(rows.base == other.base for rows in self.lineage)

    def per_row(self, other: RowSet) -> int:
        """Return how many of these rows belong to each row of `other`, which they may read."""
        rows_each = 1
        for rows in self.lineage:
            if rows.base == other.base:
                return rows_each
            rows_each *= rows.samples
        raise ValueError(f"{self.name} may not read {other.name}")

    def children(self, other: RowSet) -> int:
        """Return how many rows of `other` were made from each of these rows; 1 if each corresponds to a row there.

        >>> prompts = RowSet("prompts", "prompts")
        >>> prompts.children(RowSet("group", "prompts", 4, prompts)), prompts.children(prompts)
        (4, 1)
        """
        return 1 if self.may_read(other) else other.per_row(self)

    def groups(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the row that each of these rows was made from; for a dataset's rows, the number of their
        item.

        >>> RowSet("group", "prompts", 4, RowSet("prompts", "prompts")).groups((0, 3, 4))
        (0, 0, 1)
        """
        if self.base.choice is not None and self.base.parent is not None:
            return self.base.parent.groups(rows)
        return tuple(row // self.base.samples for row in rows)

    def dataset_rows(self, items: Sequence[int]) -> tuple[int, ...]:
        """Return each row's number in the dataset, for a step with the batch `items`.

        >>> RowSet("group", "prompts", 2, RowSet("prompts", "prompts")).dataset_rows((7, 5))
        (7, 7, 5, 5)
        >>> RowSet("pairs", "pairs", 2).dataset_rows((3,))
        (6, 7)
        """
        if self.parent is None:
            return tuple(item * self.samples + place for item in items for place in range(self.samples))
        return tuple(row for row in self.parent.dataset_rows(items) for _ in range(self.samples))

    @property
    def rows_per_item(self) -> int:
        """Each item's rows in the dataset."""
        return prod(rows.samples for rows in self.lineage)
