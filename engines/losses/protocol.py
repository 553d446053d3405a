"""Losses as an engine sees them: the values that a loss returns, and what it needs from the forward pass.

Shapes: B rows, T response tokens (right-padded), P items of rows that belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from prefect_rlhf.placement.graph import MeanOver, Port

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossValues:
    """What a loss returns."""

    values: Tensor
    """A value per token [B, T], per row [B] or per item [P].

    The train_step averages the values at tokens of `mask`, as the loss's `mean_over` says, and ignores all others.
    """
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics, each in any of these shapes; they are averaged too."""


class Loss(Protocol):
    """A pure function of a model's outputs and the rows' other columns. Ranks import it, so it must be importable.

    Outputs come first, in the order that @loss names them: logprobs, values and entropy are [B, T], scores [B];
    `placement/models/outputs.py` has the shape of any other. Then comes `batch`: padded columns [B, T] or [B], and
    `mask` [B, T], which is 1.0 at trained tokens. Padding is 0, and so are outputs at tokens with mask 0.0. Rows that
    belong together (a chosen and a rejected answer) are adjacent.
    """

    def __call__(self, *outputs_and_batch: Tensor | Mapping[str, Tensor]) -> LossValues: ...


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A loss of a train_step: the outputs that it needs from the forward pass, by name, and its weight in the sum.

    The step's loss is the sum over terms of `weight` times the mean.
    """

    loss: Loss
    outputs: tuple[str, ...]
    name: str = ""
    """Tells its metrics from those of other terms; empty for a single term."""
    weight: float = 1.0
    mean_over: MeanOver = "tokens"
    temperature: float = 1.0
    inputs: tuple[Port, ...] = ()
    """The ports of its columns."""
