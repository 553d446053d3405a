"""JSON from a file, plain or gzipped; orjson reads tables of millions of entries in half the time of `json`."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import orjson

from prefect_rlhf.placement.errors import InvalidInput


def read_json(path: Path, field: str) -> Any:
    """What the file says. Raises InvalidInput of `field` where it cannot be read, or is no JSON."""
    try:
        content = path.read_bytes()
        return orjson.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
    except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InvalidInput(field, str(path), f"JSON, or gzipped JSON ({error})") from error
    except OSError as error:
        raise InvalidInput(field, str(path), f"a file of JSON ({error.strerror or error})") from error
