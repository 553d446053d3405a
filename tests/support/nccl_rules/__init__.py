"""NCCL's rules, enforced on ranks that exchange by gloo.

Gloo accepts calls that hang on NCCL or are undefined there. A rank that imports `tests.support.nccl_rules.ranks` takes
the branches of GPU ranks, and each of its calls of torch.distributed is checked:

1. The first use of a group is a collective, or a batch of messages of all its members.
2. A message outside of a batch ends with its receive: no circle of ranks sends before it receives.
3. Any two ranks use the groups that they share in the same order.
4. A rank uses its groups from a single thread.

Rows, Python objects and barriers are exempt: on GPU ranks gloo carries them. So are groups of a single rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from prefect_rlhf.engines.gang import open as opening

RANKS = "tests.support.nccl_rules.ranks"
"""The module that ranks import before all others."""
FOLDER = "NCCL_RULES_FOLDER"
"""Environment variable: the folder of the records."""


@dataclass(frozen=True, slots=True)
class Records:
    """What ranks checked and found, a file for each process in a folder."""

    folder: Path

    def checked(self) -> set[str]:
        """Return the kinds of calls that any rank made, such as `allreduce` and `batch`."""
        return {line for line in self._lines() if not line.startswith("broken: ")}

    def broken(self) -> list[str]:
        """Return the broken rules, a line each."""
        return [line for line in self._lines() if line.startswith("broken: ")]

    def _lines(self) -> list[str]:
        return [line for file in self.folder.iterdir() for line in file.read_text().splitlines()]


@contextmanager
def nccl_rules(folder: Path) -> Iterator[Records]:
    """Enforce the rules in the ranks of all gangs that are opened in the block."""
    folder.mkdir()
    modules_of = opening.modules_of
    first = patch.object(opening, "modules_of", lambda engines: (RANKS, *modules_of(engines)))
    with patch.dict("os.environ", {FOLDER: str(folder)}), first:
        yield Records(folder)
