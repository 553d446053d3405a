"""Samples from a step: the first rows of its Parquet files, with prompts, responses and scores."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prefect_rlhf.tasks.data.rollouts import ROLLOUTS

TEXTS = ("prompt", "response")
SHORTER = "user_message"  # in place of the prompt: the template's system prompt is the same in all rows


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts and numbers under `columns`, texts first."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]

    def texts(self) -> list[list[str]]:
        """Return heading and rows as text: numbers with four digits, unknown values as empty text."""
        return [list(self.columns), *([_text(value) for value in row] for row in self.rows)]


def read_samples(run_dir: Path, step: int, number: int, *, of_rollouts: bool = True) -> Mapping[str, Table]:
    """Return the first `number` rows of each of a step's Parquet files, by folder: `rollouts`, `evaluation`.

    Columns are the last user message, or else the prompt, the response and all floating-point numbers; a file without
    these texts has no samples.
    """
    files = sorted(run_dir.glob(f"*/step-{step:06d}.parquet")) if number else []
    wanted = [file for file in files if of_rollouts or file.parent.name != ROLLOUTS]
    tables = {file.parent.name: _first_rows(file, number) for file in wanted}
    return {folder: table for folder, table in tables.items() if table is not None}


def _first_rows(file: Path, number: int) -> Table | None:
    with pq.ParquetFile(file) as rows:
        schema = rows.schema_arrow
        if not set(TEXTS) <= set(schema.names):
            return None
        asked = SHORTER if SHORTER in schema.names else TEXTS[0]
        columns = (asked, TEXTS[1], *(field.name for field in schema if pa.types.is_floating(field.type)))
        for batch in rows.iter_batches(batch_size=number, columns=list(columns)):
            return Table(columns, tuple(tuple(row[name] for name in columns) for row in batch.to_pylist()))
    return None


def _text(value: str | float | None) -> str:
    if value is None or value != value:  # NaN: a row without a reward
        return ""
    return value if isinstance(value, str) else f"{value:.4g}"
