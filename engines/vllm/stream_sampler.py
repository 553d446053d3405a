"""Our sampling rule instead of vLLM's sampler, for its runner on CUDA (Model Runner V2).

A test compares it with the sampler for the CPU, on a GPU too.

Shapes: R rows that the engine can have, L tokens of the longest, B rows of a step, V vocabulary.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from prefect_rlhf.engines.sampling.sampler import Choice, choose, uniforms
from prefect_rlhf.engines.vllm.sampler import shown
from prefect_rlhf.errors.errors import EngineFailed

FILTERED_AT_ONCE = 1 << 22  # probabilities that a filter sorts at once: some 40 bytes each, 12 are certified


class _Rule(NamedTuple):
    """How a row is sampled; greedily at temperature 0."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    shows_kept_mass: bool = False


class StreamSampler:
    """A sampler that takes the k-th token of a row by `choose`, with the k-th number of the row's stream.

    k follows from the row's length, so a row that was preempted draws the same numbers when it resumes. All numbers of
    a row are drawn on the host when it begins; a step sends a number per row to the device and never waits for it.

    Supports all of `SamplingSettings`, which all rows of a step share, and reports as RowSampler does. It has the
    members that vLLM's runner uses, and no tables of rows x vocabulary, which vLLM's own sampler keeps for penalties.
    """

    compute_nans = False
    penalties_state = SimpleNamespace(output_bin_counts=None)  # None: the runner counts no tokens

    def __init__(self, *, req_states: Any, **_options: Any) -> None:
        self._rows = req_states
        self._rules: dict[int, _Rule] = {}
        # The operating system provides the pages of an array of zeros when they are first written.
        self._numbers_RL = np.zeros((req_states.max_num_reqs, req_states.max_model_len))

    def add_request(self, row: int, parameters: SamplingParams) -> None:
        """Draw the row's numbers. A row that resumes is added again, perhaps in another place."""
        num_tokens = min(parameters.max_tokens or 1, self._numbers_RL.shape[1])
        self._numbers_RL[row, :num_tokens] = uniforms([parameters.seed or 0], num_tokens)[0].numpy()
        filters = parameters.top_p, parameters.top_k, parameters.min_p
        self._rules[row] = _Rule(parameters.temperature, *filters, shows_kept_mass=bool(parameters.logprobs))

    def apply_staged_writes(self) -> None:
        """Do nothing: no state is on the device."""

    def __call__(self, logits_BV: Tensor, batch: Any) -> SamplerOutput:
        """Sample a token for each row; a row whose prompt has further chunks drops it.

        Raises EngineFailed for rows with several settings.
        """
        rows_B = batch.idx_mapping_np
        rules = {self._rules.get(row, _Rule()) for row in rows_B.tolist()}  # vLLM measures with rows it never added
        if len(rules) != 1:
            raise EngineFailed(f"vLLM samples rows with {len(rules)} different settings in a step, expected 1")
        (rule,) = rules
        lengths_B = batch.num_computed_tokens_np + batch.num_scheduled_tokens
        next_B = (lengths_B - self._rows.prompt_len.np[rows_B]).clip(0, self._numbers_RL.shape[1] - 1)
        uniforms_B = async_tensor_h2d(self._numbers_RL[rows_B, next_B], device=logits_BV.device)
        choice = _chosen(logits_BV, uniforms_B, rule)
        tokens_B1 = choice.tokens_B[:, None]
        is_sampled_B = (lengths_B >= batch.prefill_len_np).astype(np.int32)
        return SamplerOutput(
            sampled_token_ids=tokens_B1,
            logprobs_tensors=shown(choice, tokens_B1, rule.shows_kept_mass),
            num_nans=None,
            num_sampled=async_tensor_h2d(is_sampled_B, device=logits_BV.device),
            num_rejected=torch.zeros(len(rows_B), dtype=torch.int32, device=logits_BV.device),
        )


def _chosen(logits_BV: Tensor, uniforms_B: Tensor, rule: _Rule) -> Choice:
    """Choose for all rows, some at a time if a filter sorts their probabilities."""
    if not rule.temperature:
        return choose(logits_BV, None)
    num_rows, vocabulary = logits_BV.shape
    at_once = max(1, FILTERED_AT_ONCE // vocabulary) if rule.shows_kept_mass else num_rows
    some = zip(torch.split(logits_BV, at_once), torch.split(uniforms_B, at_once), strict=True)
    tokens, logprobs, kept_masses = zip(*(_chosen_at_once(*rows, rule) for rows in some), strict=True)
    kept_mass_B = torch.cat(kept_masses) if rule.shows_kept_mass and kept_masses[0] is not None else None
    return Choice(torch.cat(tokens), torch.cat(logprobs), kept_mass_B)


def _chosen_at_once(logits_BV: Tensor, uniforms_B: Tensor, rule: _Rule) -> Choice:
    num_rows = len(logits_BV)
    if num_rows == 1:  # torch's running sum of a single row on CUDA varies with each call; ranks must agree on tokens
        logits_BV, uniforms_B = logits_BV.expand(2, -1), uniforms_B.expand(2)
    tokens_B, logprobs_B, kept_mass_B = choose(logits_BV, uniforms_B, *rule[:-1])
    kept_mass_B = None if kept_mass_B is None else kept_mass_B[:num_rows]
    return Choice(tokens_B[:num_rows], logprobs_B[:num_rows], kept_mass_B)
