"""Sampling on CPU in two passes over the vocabulary.

Shapes: B rows, V vocabulary, N blocks of K tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

_BLOCK = 256


class RowSampler(Sampler):  # type: ignore[misc]  # vLLM's classes are Any to the type checker
    """Draws each row by inverting its cumulative distribution at one number from the row's own generator.

    Knows what `SamplingSettings` can ask for: greedy or not, temperature, top_p, and the log-probability of the sampled
    token alone. vLLM's sampler draws noise for every token of the vocabulary and ranks the sampled one.
    """

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *_args: Any, **_options: Any
    ) -> SamplerOutput:
        logits_BV = _filtered(logits, sampling_metadata)
        probs_BV = logits_BV.softmax(-1, dtype=torch.float32)
        if sampling_metadata.all_greedy:
            tokens_B = logits_BV.argmax(-1)
        else:
            tokens_B = draw(probs_BV, _uniforms(sampling_metadata, len(probs_BV)))
        logprobs_B1 = probs_BV.gather(1, tokens_B[:, None]).log()
        tokens_B1 = tokens_B.int()[:, None]
        ranks_B = torch.zeros_like(tokens_B)  # nobody asks for them
        return SamplerOutput(tokens_B1, LogprobsTensors(tokens_B1, logprobs_B1, ranks_B))


def draw(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """The tokens at the uniforms' places in the cumulative distributions: first the block, then inside it.

    >>> draw(torch.tensor([[0.25, 0.0, 0.75]] * 3), torch.tensor([0.2, 0.25, 0.999])).tolist()
    [0, 2, 2]
    """
    num_missing = -probs_BV.shape[1] % _BLOCK
    if num_missing:  # padding copies even when it adds nothing
        probs_BV = F.pad(probs_BV, (0, num_missing))
    probs_BNK = probs_BV.view(len(probs_BV), -1, _BLOCK)
    sums_BN = probs_BNK.sum(-1).double()
    blocks_B, rest_B = _find(sums_BN, uniforms_B * sums_BN.sum(-1))
    inside_BK = probs_BNK[torch.arange(len(blocks_B)), blocks_B].double()
    places_B, _ = _find(inside_BK, rest_B)
    return blocks_B * _BLOCK + places_B


def _find(weights_BN: Tensor, targets_B: Tensor) -> tuple[Tensor, Tensor]:
    """The first index at which the running sum exceeds the target (so its weight is not 0), and what is left there."""
    ends_BN = weights_BN.cumsum(-1)
    last_B = ends_BN[:, -1]
    targets_B = torch.minimum(targets_B, torch.nextafter(last_B, torch.zeros_like(last_B)))  # rounding may pass the end
    found_B1 = torch.searchsorted(ends_BN, targets_B[:, None], right=True)
    starts_B1 = ends_BN.gather(1, found_B1) - weights_BN.gather(1, found_B1)
    return found_B1[:, 0], (targets_B - starts_B1[:, 0]).clamp_min(0)


def _filtered(logits_BV: Tensor, metadata: SamplingMetadata) -> Tensor:
    """Logits of the distribution to sample from."""
    if metadata.all_greedy:
        return logits_BV
    if (metadata.temperature != 1).any():
        logits_BV = logits_BV.float() / metadata.temperature[:, None]
    if metadata.top_p is not None:
        logits_BV = apply_top_k_top_p(logits_BV.float(), None, metadata.top_p)
    return logits_BV


def _uniforms(metadata: SamplingMetadata, num_rows: int) -> Tensor:
    """One number in [0, 1) from each row's generator."""
    generators = [metadata.generators[row] for row in range(num_rows)]
    return torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
