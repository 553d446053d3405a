"""Context and result of a computation on rows, wherever it is defined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Context:
    """The place and time of a computation: what a writer of files or of text needs beside its rows."""

    step: int
    run_dir: Path
    tokenizer: str  # folder of the actor's tokenizer
    row_ids: tuple[int, ...]  # the rows' numbers in the dataset
    versions: Mapping[str, int] = field(default_factory=dict)  # role -> weight version that made the rows


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a computation: columns ([B] or right-padded [B, T]), metrics of the step, state for the next."""

    columns: Mapping[str, Tensor] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Any = None
