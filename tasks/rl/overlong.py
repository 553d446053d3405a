"""Responses that do not end within the limit: how they are found, and the penalty on their scores.

Shapes: B rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefect_rlhf.engines.rows import Batch

if TYPE_CHECKING:
    from torch import Tensor


def truncated_rows(rollout: Batch, max_new_tokens: int) -> Tensor:
    """Return [B] float: 1.0 for a response that was cut off, from the key `truncated` if present.

    Without that key, a response of `max_new_tokens` tokens counts as cut off, even if its last token ends it.
    """
    if "truncated" in rollout:
        return rollout["truncated"].float()
    return (response_lengths(rollout) >= max_new_tokens).float()


def response_lengths(rollout: Batch) -> Tensor:
    """Return [B]: the response tokens of each row, trained on or not."""
    return rollout.mask("logprobs").sum(1)


def overlong_penalty(lengths_B: Tensor, max_new_tokens: int, buffer: int) -> Tensor:
    """Return [B], between -1 and 0: the penalty for a response's length (Yu et al. 2025, DAPO, equation 13).

    0 up to L_max - L_cache tokens, (L_max - L_cache - length) / L_cache up to L_max, and -1 beyond; L_max is
    `max_new_tokens`, L_cache `buffer`.

    >>> import torch
    >>> overlong_penalty(torch.tensor([70.0, 90.0, 100.0]), max_new_tokens=100, buffer=20)
    tensor([ 0.0000, -0.5000, -1.0000])
    """
    return ((max_new_tokens - buffer - lengths_B) / buffer).clamp(-1, 0)
