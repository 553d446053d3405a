"""Files that may be compressed: `.gz` and `.zst` after the suffix of their format."""

from __future__ import annotations

import io
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa

from prefect_rlhf.files.foreign_file import require_regular

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
READING = (OSError, pa.ArrowException)
"""Errors that reading such a file may raise."""


def uncompressed(path: Path) -> Path:
    """Return a file's name without the suffix of its compression.

    >>> uncompressed(Path("rows.jsonl.gz")).name, uncompressed(Path("rows.jsonl")).name
    ('rows.jsonl', 'rows.jsonl')
    """
    return path.with_suffix("") if path.suffix in COMPRESSIONS else path


def opened(path: Path) -> BinaryIO:
    """Return the content of a regular file as a stream of lines. Raises OSError."""
    require_regular(path)
    kind = COMPRESSIONS.get(path.suffix)
    if kind is None:
        return path.open("rb")
    return cast(BinaryIO, io.BufferedReader(pa.input_stream(str(path), compression=kind)))
