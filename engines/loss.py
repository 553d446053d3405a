"""Losses as an engine sees them: what a loss returns, and what a train_step asks of a forward pass for it.

Shapes: B rows, T response tokens (right-padded), P items of rows that belong together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from prefect_rlhf.placement.graph import MeanOver, Port

if TYPE_CHECKING:
    from torch import Tensor

Output = Literal["logprobs", "values", "scores", "entropy"]
"""Of a response token its log-probability, its value or the entropy of the distribution it is from; a row's score."""


@dataclass(frozen=True, slots=True)
class LossValues:
    """What a loss returns: a value for each token [B, T], each row [B] or each item [P]; metrics in any of the three.

    The train_step takes the mean of them that its term says, over the tokens of `mask`; values elsewhere count nowhere.
    """

    values: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


class Loss(Protocol):
    """A pure function of a model's outputs and the rows' other columns; importable, so that it crosses processes.

    Outputs come first, in the order asked for: logprobs, values and entropy are [B, T], scores [B]. `batch` holds
    padded columns [B, T] or [B], and `mask` [B, T], 1.0 at tokens that are trained on. Padded positions hold zeros.
    Rows that belong together (a chosen and a rejected answer) are adjacent.
    """

    def __call__(self, *outputs_and_batch: Tensor | Mapping[str, Tensor]) -> LossValues: ...


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One loss of a train_step: what it asks of the forward pass, and how its values become a part of the sum.

    The step's loss is the sum over terms of `weight` times the mean. `inputs` are the ports whose columns it sees;
    `name` tells its metrics from those of other terms, and is empty where there is no other.
    """

    loss: Loss
    outputs: tuple[Output, ...]
    name: str = ""
    weight: float = 1.0
    mean_over: MeanOver = "tokens"
    temperature: float = 1.0
    inputs: tuple[Port, ...] = ()
