"""Our sampling rule instead of vLLM's sampler, for its runner on CPU.

Shapes: B rows, V vocabulary, N log-probabilities of a token.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import MinPLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from prefect_rlhf.engines.sampling.sampler import Choice, choose


class RowSampler(Sampler):  # type: ignore[misc]  # vLLM's classes are Any to the type checker
    """A sampler that takes each row's token by `choose`, with the next number of the row's own generator.

    Supports all of `SamplingSettings`: greedy or not, temperature, top_k, top_p, min_p, and the log-probability of the
    sampled token alone. A request for another log-probability gets the logarithm of the kept mass in its place. vLLM's
    sampler draws noise for every token of the vocabulary and ranks the sampled token.
    """

    def __init__(self, logprobs_mode: str = "raw_logprobs") -> None:
        nn.Module.__init__(self)  # not vLLM's, which on CUDA imports flashinfer for a choice that is not used here
        self.logprobs_mode = logprobs_mode

    def forward(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, *_args: Any, **_options: Any
    ) -> SamplerOutput:
        if sampling_metadata.all_greedy:
            choice = choose(logits, None)
        else:
            top_p = 1.0 if sampling_metadata.top_p is None else sampling_metadata.top_p[:, None]
            next_B = _uniforms(sampling_metadata, len(logits))
            temperature_B1 = sampling_metadata.temperature[:, None]
            top_k = 0 if sampling_metadata.top_k is None else sampling_metadata.top_k[:, None]
            min_p = _min_p(sampling_metadata)
            choice = choose(logits, next_B, temperature_B1, top_p, top_k, min_p)
        tokens_B1 = choice.tokens_B.int()[:, None]
        return SamplerOutput(tokens_B1, shown(choice, tokens_B1, sampling_metadata.max_num_logprobs == 1))


def shown(choice: Choice, tokens_B1: Tensor, with_kept_mass: bool) -> LogprobsTensors:
    """Return the log-probabilities of a choice for vLLM, [B, 1], or with the logarithm of the kept mass, [B, 2]."""
    _, logprobs_B, kept_mass_B = choice
    shown_B = [logprobs_B]
    if with_kept_mass:
        shown_B.append(torch.zeros_like(logprobs_B) if kept_mass_B is None else kept_mass_B.log())
    logprobs_BN = torch.stack(shown_B, -1)
    ranks_B = torch.zeros_like(tokens_B1[:, 0])  # not used
    return LogprobsTensors(tokens_B1.expand_as(logprobs_BN), logprobs_BN, ranks_B)


def _min_p(metadata: SamplingMetadata) -> Tensor | float:
    """Return each row's min_p, which vLLM keeps in its own processor, [B, 1]; 0 if no row has a min_p."""
    of_min_p = (one for one in metadata.logitsprocs.argmax_invariant if isinstance(one, MinPLogitsProcessor))
    return next((one.min_p for one in of_min_p if one.min_p_count), 0.0)


def _uniforms(metadata: SamplingMetadata, num_rows: int) -> Tensor:
    """Draw a number in [0, 1) from each row's generator."""
    generators = [metadata.generators[row] for row in range(num_rows)]
    return torch.stack([torch.rand((), dtype=torch.float64, generator=generator) for generator in generators])
