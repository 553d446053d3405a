"""Rows of text as a table."""

from collections.abc import Mapping, Sequence


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return rows as aligned text under their keys, two spaces between columns."""
    if not rows:
        return ""
    columns = list(rows[0])
    cells = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells
    )
