"""The record of a benchmark: a line of JSON for each finding, printed and on disk as soon as it is made."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Record:
    """Appends findings to a file. A kill at any moment leaves all lines but perhaps the last, which is then not whole.

    Each line has the name of the finding, the half that made it, and the time in UTC.
    """

    def __init__(self, file: Path, half: str) -> None:
        self._file, self._half = file, half
        file.parent.mkdir(parents=True, exist_ok=True)

    def add(self, finding: str, **values: Any) -> None:
        """Write and print a finding."""
        about = {"half": self._half, "finding": finding, "at": datetime.now(UTC).isoformat(timespec="seconds")}
        line = json.dumps({**about, **values}, default=str)
        with self._file.open("a", encoding="utf-8") as lines:
            if lines.tell() and not self._file.read_bytes().endswith(b"\n"):  # of a record that was cut
                lines.write("\n")
            lines.write(f"{line}\n")
            lines.flush()
            os.fsync(lines.fileno())
        print(line, flush=True)


def findings(file: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the whole lines of a record, in order; one that a kill cut short is left out."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


def newest(file: Path, half: str, finding: str) -> Mapping[str, Any] | None:
    """Return the last finding of that name by a half."""
    of_half = [each for each in findings(file) if (each["half"], each["finding"]) == (half, finding)]
    return of_half[-1] if of_half else None
