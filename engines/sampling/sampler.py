"""Samples tokens from logits, by the same rule for every engine that generates, in two passes over the vocabulary.

A uniform number from the row's own random stream selects the token in the row's cumulative distribution. The k-th token
of a response uses the stream's k-th number, independently of the batch and the place of the row.

Shapes: B rows, V vocabulary, N blocks of K tokens, T new tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  its usual name

SUMMED_TOGETHER = 256  # tokens of a block


class Choice(NamedTuple):
    """The sampled tokens, their log-probabilities (float32), and the total probability of the tokens to choose from.

    Log-probabilities are over the whole vocabulary at the temperature, as training and the reference model compute
    them, including tokens that top_k, top_p and min_p exclude. `kept_mass_B` is the total probability of the tokens
    that they keep, None if they keep all tokens.
    """

    tokens_B: Tensor
    logprobs_B: Tensor
    kept_mass_B: Tensor | None = None


def choose(
    logits_BV: Tensor,
    uniforms_B: Tensor | None,
    temperature_B1: Tensor | float = 1.0,
    top_p_B1: Tensor | float = 1.0,
    top_k_B1: Tensor | int = 0,
    min_p_B1: Tensor | float = 0.0,
) -> Choice:
    """Choose a token for each row: min_p filters first, then `top_k`, then the nucleus of `top_p`.

    Without uniforms the choice is greedy, from the model's own distribution; the settings are not used. With settings
    that are plain numbers, nothing waits for a GPU.

    >>> tokens, logprobs, _ = choose(torch.tensor([[1.0, 3.0]]).log(), None)
    >>> tokens.tolist(), round(logprobs.exp().item(), 4)
    ([1], 0.75)
    >>> choice = choose(torch.tensor([[1.0, 3.0, 4.0]]).log(), torch.tensor([0.99]), top_p_B1=0.6)
    >>> choice.tokens_B.tolist(), choice.logprobs_B.exp().tolist(), choice.kept_mass_B.tolist()
    ([2], [0.5], [0.875])
    """
    if uniforms_B is None:
        probs_BV = logits_BV.softmax(-1, dtype=torch.float32)
        return Choice(*_with_logprobs(probs_BV, logits_BV.argmax(-1)))
    if not _is_one(temperature_B1):
        logits_BV = logits_BV.float() / temperature_B1
    probs_BV = logits_BV.softmax(-1, dtype=torch.float32)
    kept_BV = probs_BV
    if _is_any(min_p_B1):
        kept_BV = kept_BV.masked_fill(kept_BV < min_p_B1 * kept_BV.amax(-1, keepdim=True), 0.0)
    if _is_any(top_k_B1):
        kept_BV = likeliest(kept_BV, top_k_B1)
    if not _is_one(top_p_B1):
        kept_BV = nucleus(kept_BV, top_p_B1)
    if kept_BV is probs_BV:
        return Choice(*_with_logprobs(probs_BV, draw(probs_BV, uniforms_B)))
    return Choice(*_with_logprobs(probs_BV, draw(kept_BV, uniforms_B)), kept_BV.sum(-1))


def _with_logprobs(probs_BV: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
    return tokens_B, probs_BV.gather(1, tokens_B[:, None])[:, 0].log()


def draw(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the tokens at the uniforms' positions in the cumulative distributions: first the block, then the token.

    Rows need not sum to 1.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]] * 3), torch.tensor([0.2, 0.25, 0.999])).tolist()
    [0, 2, 2]
    """
    num_missing = -probs_BV.shape[1] % SUMMED_TOGETHER
    if num_missing:  # F.pad makes a copy even with a padding of 0
        probs_BV = F.pad(probs_BV, (0, num_missing))
    probs_BNK = probs_BV.view(len(probs_BV), -1, SUMMED_TOGETHER)
    sums_BN = probs_BNK.sum(-1).double()
    blocks_B, rest_B = _find(sums_BN, uniforms_B * sums_BN.sum(-1))
    inside_BK = probs_BNK[torch.arange(len(blocks_B), device=blocks_B.device), blocks_B].double()
    places_B, _ = _find(inside_BK, rest_B)
    return blocks_B * SUMMED_TOGETHER + places_B


def likeliest(probs_BV: Tensor, top_k_B1: Tensor | int) -> Tensor:
    """Return the probabilities, with 0 for tokens less likely than the `top_k`-th; `top_k` 0 keeps a row's tokens.

    Fan et al. 2018, Hierarchical Neural Story Generation, section 5.4.

    >>> likeliest(torch.tensor([[0.125, 0.25, 0.625]]), 2).tolist()
    [[0.0, 0.25, 0.625]]
    """
    size = probs_BV.shape[1]
    if not isinstance(top_k_B1, Tensor):  # a GPU is not waited for
        least_B1 = probs_BV.topk(min(top_k_B1 or size, size), dim=-1).values[:, -1:]
        return probs_BV.masked_fill(probs_BV < least_B1, 0.0)
    count_B1 = top_k_B1.long().expand(len(probs_BV), 1)
    count_B1 = torch.where(count_B1 > 0, count_B1, size).clamp_max(size)
    descending_BK = probs_BV.topk(int(count_B1.max()), dim=-1).values
    return probs_BV.masked_fill(probs_BV < descending_BK.gather(1, count_B1 - 1), 0.0)


def nucleus(probs_BV: Tensor, top_p_B1: Tensor | float) -> Tensor:
    """Return the probabilities, with 0 outside the smallest set of likeliest tokens with `top_p` of the row's sum.

    Holtzman et al. 2020, The Curious Case of Neural Text Degeneration, section 3.1.

    >>> nucleus(torch.tensor([[0.125, 0.25, 0.625]]), 0.8).tolist()
    [[0.0, 0.25, 0.625]]
    """
    ascending_BV, order_BV = probs_BV.sort(-1)
    running_BV = ascending_BV.cumsum(-1)
    dropped_BV = running_BV <= (1 - top_p_B1) * running_BV[:, -1:]  # this token and all less likely tokens
    dropped_BV[:, -1] = False
    return probs_BV.masked_fill(dropped_BV.scatter(1, order_BV, dropped_BV), 0.0)


def row_stream(seed: int) -> torch.Generator:
    """Return the random stream of a row, on the host for every device."""
    return torch.Generator().manual_seed(stream_seed(seed))


def stream_seed(seed: int) -> int:
    """Return the seed for torch's generators, which accept only 63 bits.

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
    """Return the first index whose running sum exceeds the target (its weight is not 0), and the remaining target."""
    ends_BN = weights_BN.cumsum(-1)
    last_B = ends_BN[:, -1]
    targets_B = torch.minimum(targets_B, torch.nextafter(last_B, torch.zeros_like(last_B)))  # rounding may pass the end
    index_B1 = torch.searchsorted(ends_BN, targets_B[:, None], right=True)
    starts_B1 = ends_BN.gather(1, index_B1) - weights_BN.gather(1, index_B1)
    return index_B1[:, 0], (targets_B - starts_B1[:, 0]).clamp_min(0)


def _is_any(setting: Tensor | float) -> bool:
    return bool((setting > 0).any()) if isinstance(setting, Tensor) else setting > 0


def _is_one(setting: Tensor | float) -> bool:
    return bool((setting == 1).all()) if isinstance(setting, Tensor) else setting == 1
