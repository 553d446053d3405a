"""How each output of a forward pass is computed from the last hidden states.

Shapes: N tokens of a micro-batch, H hidden, V rows of the head's weight that this tensor-parallel rank holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch.distributed as dist
from torch import Tensor

from prefect_rlhf.engines.megatron.vocabulary.entropy import token_entropy
from prefect_rlhf.engines.megatron.vocabulary.head import token_logprobs, token_values


@dataclass(frozen=True, slots=True)
class HeadInput:
    """The input of a head, with gradients."""

    hidden_NH: Tensor
    """The states before the tokens; for an output with a value per row, the last tokens' states."""
    targets_N: Tensor
    """The tokens; empty for an output with a value per row."""
    weight_VH: Tensor
    """Its first `num_rows` rows are tokens, or a scalar head's only row."""
    temperature: float
    """Logits are divided by it."""
    tp: dist.ProcessGroup
    """The ranks over which a head of the vocabulary is split."""
    num_rows: int


OutputFunction = Callable[[HeadInput], Tensor]


@cache
def function_of(place: str) -> OutputFunction:
    """Import an output's function from its place, `module:function`."""
    module, _, name = place.partition(":")
    found: OutputFunction = getattr(import_module(module), name)
    return found


def logprobs(of: HeadInput) -> Tensor:
    """Compute the log-probability [N] of each target."""
    return token_logprobs(of.hidden_NH, of.weight_VH, of.targets_N, of.temperature, of.tp, of.num_rows)


def entropy(of: HeadInput) -> Tensor:
    """Compute the entropy [N] of each token's distribution."""
    return token_entropy(of.hidden_NH, of.weight_VH, of.temperature, of.tp, of.num_rows)


def values(of: HeadInput) -> Tensor:
    """Compute the number [N] of a scalar head."""
    return token_values(of.hidden_NH, of.weight_VH)
