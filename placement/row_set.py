"""The rows that calls work on in a step and what they were made of: which rows of different calls belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice


@dataclass(frozen=True, slots=True)
class RowCount:
    """How many rows a step has: memory is for `at_most`, seconds are those of `expected`."""

    at_most: int
    expected: int


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The most tokens of a row that a computation makes: `longest`, or `max_new_tokens` beyond its inputs' longest row.

    >>> RowLimit(longest=64).of(20), RowLimit(max_new_tokens=6).of(20)
    (64, 26)
    """

    longest: int | None = None
    max_new_tokens: int = 0

    def of(self, longest_input: int) -> int:
        """Return the most tokens, where the longest row of the inputs has so many."""
        return self.longest if self.longest is not None else longest_input + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Choice:
    """Which rows of a row set stay: those of the first `at_most` groups, `per_group` of each, or any number (None).

    A group are the rows made of one row, or those of one item of a dataset. The set chosen from has `num_rows` rows in
    groups of at most `group_size`; `expected` groups stay as a rule, which is what time is estimated by. A run ends
    where `most_empty_steps` steps after each other keep none.
    """

    num_rows: int
    group_size: int
    at_most: int
    expected: int
    per_group: int | None = None
    most_empty_steps: int = 10

    @property
    def count(self) -> RowCount:
        """The rows that stay."""
        each = self.per_group or self.group_size
        return RowCount(self.at_most * each, self.expected * each)

    def kept(self, places: Sequence[float], rows: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
        """Return the numbers of the rows that stay, group by group in the order of their numbers.

        Of a group those with a place above 0 may stay, the lowest place first, then the lowest number; with `per_group`
        so many of them, and none of a group that has fewer. A truth value is a place: True is 1. NaN leaves.

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
    """A batch of a dataset, rows made of another row set's, `samples` of each row of `parent`, or a `choice` of those.

    Rows are numbered from 0 in each step and keep their numbers for life; rows r * samples to (r + 1) * samples - 1 are
    made of row r of the parent, and rows that were chosen have the parent's numbers. Of a dataset's batch `samples` are
    the rows of one item, 2 of a pair. `name` is that of the call that makes or chooses the rows, or of the dataset,
    with what tells this batch from others of it.
    """

    name: str
    dataset: str
    samples: int = 1
    parent: RowSet | None = None
    choice: Choice | None = None

    @property
    def lineage(self) -> Iterator[RowSet]:
        """Itself and what it was made of, up to the dataset's batch."""
        rows: RowSet | None = self
        while rows is not None:
            yield rows
            rows = rows.parent

    @property
    def base(self) -> RowSet:
        """The first row set of its lineage with one of these rows for each of its own."""
        rows = self
        while rows.parent is not None and rows.samples == 1 and rows.choice is None:
            rows = rows.parent
        return rows

    @property
    def numbered(self) -> RowSet:
        """The row set whose numbers these rows have: itself, or the one that they were chosen from."""
        rows = self
        while rows.choice is not None and rows.parent is not None:
            rows = rows.parent
        return rows

    @property
    def choices(self) -> tuple[RowSet, ...]:
        """The chosen row sets of its lineage: who chooses must have run before anyone knows which rows these are."""
        return tuple(rows for rows in self.lineage if rows.choice is not None)

    @property
    def group_size(self) -> int:
        """The most rows that were made of one row, or are of one item."""
        if self.choice is not None:
            return self.choice.per_group or self.choice.group_size
        return self.base.group_size if self.base is not self else self.samples

    @property
    def adjacent(self) -> int:
        """The rows that surely stand together: a whole group, or one row where a choice leaves any number of each."""
        choice = self.base.choice
        return self.group_size if choice is None else choice.per_group or 1

    def may_read(self, other: RowSet) -> bool:
        """Whether each of these rows has one row of `other` as its own.

        That is so of the same rows, of those that they were made of, and of what stands for either one to one.

        >>> prompts = RowSet("prompts", "prompts")
        >>> group, baseline = RowSet("group", "prompts", 4, prompts), RowSet("baseline", "prompts", 1, prompts)
        >>> group.may_read(prompts), group.may_read(baseline), baseline.may_read(group)
        (True, True, False)
        """
        return any(rows.base == other.base for rows in self.lineage)

    def per_row(self, other: RowSet) -> int:
        """Return how many of these rows belong to one row of `other`, which they may read."""
        rows_each = 1
        for rows in self.lineage:
            if rows.base == other.base:
                return rows_each
            rows_each *= rows.samples
        raise ValueError(f"{self.name} may not read {other.name}")

    def groups(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the row that each of these was made of; of a dataset's rows that of their item.

        >>> RowSet("group", "prompts", 4, RowSet("prompts", "prompts")).groups((0, 3, 4))
        (0, 0, 1)
        """
        if self.base.choice is not None and self.base.parent is not None:
            return self.base.parent.groups(rows)
        return tuple(row // self.base.samples for row in rows)

    def dataset_rows(self, items: Sequence[int]) -> tuple[int, ...]:
        """Return the number in the dataset behind each row of a step whose batch is `items`.

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
        """The rows of each item of the dataset."""
        rows_each = 1
        for rows in self.lineage:
            rows_each *= rows.samples
        return rows_each
