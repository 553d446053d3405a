"""Taking a token from logits: one rule for every engine that generates, in two passes over the vocabulary.

A sampled token is where a number from the row's own random stream falls in the row's cumulative distribution; the k-th
token of a response takes the stream's k-th number, whatever the row is batched with and wherever it runs.

Shapes: B rows, V vocabulary, N blocks of K tokens, T new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everybody calls it

SUMMED_TOGETHER = 256  # tokens of a block


def choose(
    logits_BV: Tensor,
    uniforms_B: Tensor | None,
    temperature_B1: Tensor | float = 1.0,
    top_p_B1: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Take tokens [B]; return them and their log-probabilities [B] (float32) in the distribution they are taken from.

    Without uniforms the choice is greedy, from the model's own distribution: temperature and top_p play no part.

    >>> tokens, logprobs = choose(torch.tensor([[1.0, 3.0]]).log(), None)
    >>> tokens.tolist(), round(logprobs.exp().item(), 4)
    ([1], 0.75)
    """
    if uniforms_B is None:
        probs_BV = logits_BV.softmax(-1, dtype=torch.float32)
        tokens_B = logits_BV.argmax(-1)
    else:
        probs_BV = _filtered(logits_BV, temperature_B1, top_p_B1).softmax(-1, dtype=torch.float32)
        tokens_B = draw(probs_BV, uniforms_B)
    return tokens_B, probs_BV.gather(1, tokens_B[:, None])[:, 0].log()


def draw(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Find the tokens at the uniforms' places in the cumulative distributions: first the block, then inside it.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]] * 3), torch.tensor([0.2, 0.25, 0.999])).tolist()
    [0, 2, 2]
    """
    num_missing = -probs_BV.shape[1] % SUMMED_TOGETHER
    if num_missing:  # padding copies even when it adds nothing
        probs_BV = F.pad(probs_BV, (0, num_missing))
    probs_BNK = probs_BV.view(len(probs_BV), -1, SUMMED_TOGETHER)
    sums_BN = probs_BNK.sum(-1).double()
    blocks_B, rest_B = _find(sums_BN, uniforms_B * sums_BN.sum(-1))
    inside_BK = probs_BNK[torch.arange(len(blocks_B), device=blocks_B.device), blocks_B].double()
    places_B, _ = _find(inside_BK, rest_B)
    return blocks_B * SUMMED_TOGETHER + places_B


def nucleus(logits_BV: Tensor, top_p_B1: Tensor | float) -> Tensor:
    """Return the logits with minus infinity for all but the fewest likeliest tokens that together have `top_p`.

    Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, section 3.1.

    >>> nucleus(torch.tensor([[1.0, 2.0, 5.0]]).log(), 0.8).exp().round().tolist()
    [[0.0, 2.0, 5.0]]
    """
    ascending_BV, order_BV = logits_BV.sort(-1)
    below_BV = ascending_BV.softmax(-1, dtype=torch.float32).cumsum(-1)  # of this token and all less likely ones
    dropped_BV = below_BV <= 1 - top_p_B1
    dropped_BV[:, -1] = False
    return logits_BV.masked_fill(dropped_BV.scatter(1, order_BV, dropped_BV), -torch.inf)


def row_stream(seed: int) -> torch.Generator:
    """Return the random stream of one row, on the host whatever the device."""
    return torch.Generator().manual_seed(stream_seed(seed))


def stream_seed(seed: int) -> int:
    """Return the seed as torch's generators take it: they know no more than 63 bits.

    >>> stream_seed(-1) == stream_seed(2**63 - 1)
    True
    """
    return seed % 2**63


def uniforms(seeds: Sequence[int], num_tokens: int) -> Tensor:
    """Return [B, T], the first numbers in [0, 1) of each row's stream."""
    if not seeds:
        return torch.empty(0, num_tokens, dtype=torch.float64)
    return torch.stack([torch.rand(num_tokens, dtype=torch.float64, generator=row_stream(seed)) for seed in seeds])


def _find(weights_BN: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
    """Find the first index at which the running sum exceeds the target (so its weight is not 0), and what is left."""
    ends_BN = weights_BN.cumsum(-1)
    last_B = ends_BN[:, -1]
    targets_B = torch.minimum(targets_B, torch.nextafter(last_B, torch.zeros_like(last_B)))  # rounding may pass the end
    index_B1 = torch.searchsorted(ends_BN, targets_B[:, None], right=True)
    starts_B1 = ends_BN.gather(1, index_B1) - weights_BN.gather(1, index_B1)
    return index_B1[:, 0], (targets_B - starts_B1[:, 0]).clamp_min(0)


def _filtered(logits_BV: Tensor, temperature_B1: Tensor | float, top_p_B1: Tensor | float) -> Tensor:
    """Return the logits of the distribution to sample from."""
    if not _is_one(temperature_B1):
        logits_BV = logits_BV.float() / temperature_B1
    return logits_BV if _is_one(top_p_B1) else nucleus(logits_BV.float(), top_p_B1)


def _is_one(setting: Tensor | float) -> bool:
    return bool((setting == 1).all()) if isinstance(setting, Tensor) else setting == 1
