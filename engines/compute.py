"""Context and result of a computation on rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from prefect_rlhf.engines.registry import Registry
from prefect_rlhf.errors.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

State = TypeVar("State")

STATE_TYPES: Registry[type] = Registry("state")


def saved_state(kind: type[State]) -> type[State]:
    """Register a dataclass that computations return as `state`; checkpoints store it under its own name."""
    STATE_TYPES.add(kind.__name__, kind, kind)
    return kind


@dataclass(frozen=True, slots=True)
class Context:
    """The step and folder of a computation, the origin of its rows, and the tokenizers of the roles.

    Steps count from 1. An evaluation has the number of the step before it, so 0 before training.

    Rows that a role generated have its tokenizer; tokens of a computation have that of the role that reads them.

    Before a run, every computation is tried on a few rows in a process of its own, with a `run_dir` that no other
    computation uses.
    """

    step: int
    run_dir: Path  # the run's folder
    only_tokenizer: str | InvalidInput  # as `tokenizer`, or why there is no such folder
    row_ids: tuple[int, ...]  # the rows' numbers in the dataset
    versions: Mapping[str, int] = field(default_factory=dict)  # role -> weight version that contributed to the rows
    generated_by: str | None = None  # the role that generated the rows; None for a dataset's rows
    tokenizers: Mapping[str, str] = field(default_factory=dict)  # role -> folder of its tokenizer

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer of all tokens that it reads and makes; raises InvalidInput for several."""
        if isinstance(self.only_tokenizer, InvalidInput):
            raise self.only_tokenizer
        return self.only_tokenizer

    @property
    def weight_version(self) -> int:
        """The version of the weights that generated the rows; 0 for rows that no model generated."""
        return self.versions.get(self.generated_by, 0) if self.generated_by else 0


@dataclass(frozen=True, slots=True)
class Computed:
    """The result of a computation: columns ([B] or right-padded [B, T]), metrics of the step, state for the next.

    Rows of other lengths than its inputs' (new tokens) are a list with a tensor for each row.

    A state is None, plain values that JSON can hold, or a dataclass that is marked as `saved_state`.
    """

    columns: Mapping[str, Tensor | Sequence[Tensor]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    state: Any = None
