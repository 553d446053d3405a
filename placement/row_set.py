"""The rows that calls work on in a step and what they were made of: which rows of different calls belong together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowSet:
    """A batch of a dataset, or rows made of another row set's: `samples` of each row of `parent`.

    Rows are numbered from 0 in each step and keep their numbers for life; rows r * samples to (r + 1) * samples - 1 are
    made of row r of the parent. Of a dataset's batch `samples` are the rows of one item, 2 of a pair. `name` is that of
    the call that makes the rows, or of the dataset, with what tells this batch from others of it.
    """

    name: str
    dataset: str
    samples: int = 1
    parent: RowSet | None = None

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
        while rows.parent is not None and rows.samples == 1:
            rows = rows.parent
        return rows

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
