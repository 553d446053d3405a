"""The context and the result of a computation on rows."""

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
    """Decorate a dataclass that your computation returns as `state`: checkpoints then save it, under its name."""
    STATE_TYPES.add(kind.__name__, kind, kind)
    return kind


@dataclass(frozen=True, slots=True)
class Context:
    """What a computation can know besides its rows; name an argument `context` to get it.

    Before a run, every computation is tried on a few rows in a separate process, with a `run_dir` of its own.
    """

    step: int
    """Counted from 1. An evaluation has the number of the step before it, so 0 before training."""
    run_dir: Path
    """The run folder."""
    only_tokenizer: str | InvalidInput
    """Like `tokenizer`, or the reason why no single folder fits."""
    row_ids: tuple[int, ...]
    """The rows' numbers in the dataset."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """For each role that contributed to the rows, the version of its weights."""
    generated_by: str | None = None
    """The role that generated the rows; None if they come from a dataset."""
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    """For each role, the folder of its tokenizer."""

    @property
    def tokenizer(self) -> str:
        """The folder of the tokenizer for all tokens that the computation reads and makes.

        Generated rows have the tokenizer of the role that wrote them; tokens that you make have the tokenizer of the
        role that will read them. Raises InvalidInput if these differ.
        """
        if isinstance(self.only_tokenizer, InvalidInput):
            raise self.only_tokenizer
        return self.only_tokenizer

    @property
    def weight_version(self) -> int:
        """The version of the weights that generated the rows; 0 if no model did."""
        return self.versions.get(self.generated_by, 0) if self.generated_by else 0


@dataclass(frozen=True, slots=True)
class Computed:
    """What a computation returns."""

    columns: Mapping[str, Tensor | Sequence[Tensor]] = field(default_factory=dict)
    """Each key as [B] or right-padded [B, T]; for new rows with lengths of their own, a list with a tensor per row."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers for the step's metrics."""
    state: Any = None
    """Passed to the next step: None, plain values that JSON can hold, or a dataclass with @saved_state."""
