"""Findings of a step, written and printed one by one as they come: a step that is cut keeps what it found."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO


class Findings(dict[str, Any]):
    """Findings by name. Each becomes a line of JSON in `file`, with `about` and the time, and a line of `terminal`."""

    def __init__(
        self, file: Path | None = None, about: Mapping[str, Any] | None = None, terminal: TextIO | None = None
    ) -> None:
        super().__init__()
        self._file, self._about, self._terminal = file, dict(about or {}), terminal

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self._file is not None:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            with self._file.open("a") as lines:
                print(json.dumps({"name": name, "value": value, **self._about, "at": at}, default=str), file=lines)
        if self._terminal is not None:
            print(f"  {self._about.get('step', '')}: {name} = {shown(value)}", file=self._terminal, flush=True)

    def update(self, found: Mapping[str, Any]) -> None:  # type: ignore[override]  # of names alone
        for name, value in found.items():
            self[name] = value


def kept(file: Path) -> dict[str, Any]:
    """Return the findings in a file, by name."""
    lines = map(json.loads, file.read_text().splitlines()) if file.is_file() else ()
    return {line["name"]: line["value"] for line in lines}


def shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def card() -> dict[str, str]:
    """Return the names of the first GPU and of its driver, as the driver's tool knows them; none without it."""
    if not (program := shutil.which("nvidia-smi")):
        return {}
    command = [program, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return _named(answer.stdout.splitlines())


def _named(lines: Iterable[str]) -> dict[str, str]:
    first = next(iter(lines), "")
    return dict(zip(("card", "driver"), (part.strip() for part in first.split(",")), strict=False)) if first else {}
