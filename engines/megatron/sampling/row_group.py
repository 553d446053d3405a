"""A group of rows that take every step of a generation together: their tokens and log-probabilities so far.

Shapes: R rows of the group, B remaining rows, S tokens of the longest prompt, T new tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.megatron.key_value_cache import Decode, KeyValueCache, Prefill
from prefect_rlhf.engines.megatron.packing import Packing, to_device
from prefect_rlhf.engines.sampling.stop_strings import StopStrings
from prefect_rlhf.placement.models.engine_constants import PASS_TOKENS


class RowGroup:
    """A group of rows: `rows` are their positions in the call. Remaining row i is in slot i of the cache.

    The host keeps the responses, and decides which rows remain. It waits for the device once per step, for the sampled
    tokens.
    """

    def __init__(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sampling: SamplingSettings,
        end_tokens: Tensor,
        cache: KeyValueCache,
        stops: StopStrings | None = None,
        at_most: Sequence[int] | None = None,
    ) -> None:
        self.rows, self.cache = torch.tensor(rows), cache
        self._prompts = [torch.tensor(prompts[row]) for row in rows]
        self._lengths_R = torch.tensor([len(prompt) for prompt in self._prompts])
        self._ends, self._stops = end_tokens, stops
        limits = [sampling.max_new_tokens] * len(rows) if at_most is None else [at_most[row] for row in rows]
        self._limits_R, self._max_tokens = torch.tensor(limits), max(limits)
        self._tokens_RT = torch.zeros(len(rows), sampling.max_new_tokens, dtype=torch.long)
        self._logprobs_RT = torch.zeros(len(rows), sampling.max_new_tokens)
        self._num_tokens_R = torch.zeros(len(rows), dtype=torch.long)
        self._going_B = torch.arange(len(rows))
        self.num_steps = 0  # new tokens of each remaining row
        # of the remaining rows, on the device: the positions in the call, the prompts' lengths, the newest tokens
        self.numbers_B, self._lengths_B = to_device((self.rows, self._lengths_R), cache.tensor.device)
        self._newest_B = torch.zeros_like(self.numbers_B)

    @property
    def size(self) -> int:
        """The number B of remaining rows."""
        return len(self._going_B)

    def prefills(self) -> Iterator[tuple[Tensor, Prefill, Tensor]]:
        """Yield, for several rows at a time, tokens [1, N], the pass over them and the place of each prompt's last
        token.
        """
        longest, device = max(len(prompt) for prompt in self._prompts), self.cache.tensor.device
        count = max(1, PASS_TOKENS // longest)
        for slot in range(0, len(self._prompts), count):
            prompts, lengths = self._prompts[slot : slot + count], self._lengths_R[slot : slot + count]
            packing = Packing.of(lengths, int(lengths.max()))
            tokens_N = torch.nn.utils.rnn.pad_sequence(prompts).flatten()[packing.token_N]
            last_B = packing.place_SB[lengths - 1, torch.arange(len(prompts))]
            tokens_N, last_B = to_device((tokens_N, last_B), device)
            yield tokens_N[None], Prefill(packing.to(device), self.cache, slot), last_B

    def decode(self) -> tuple[Tensor, Decode]:
        """Return the newest tokens [B, 1], and the pass over them."""
        newest = self.num_steps - 1
        num_places = min(max(len(prompt) for prompt in self._prompts) + newest + 1, self.cache.length)
        return self._newest_B[:, None], Decode.at(self._lengths_B + newest, num_places, self.cache)

    def take(self, choice_2B: Tensor) -> None:
        """Append the next token and its log-probability to each remaining row; remove finished rows."""
        tokens_B, logprobs_B = choice_2B.cpu()
        self._newest_B = choice_2B[0].long()
        self._tokens_RT[self._going_B, self.num_steps] = tokens_B.long()
        self._logprobs_RT[self._going_B, self.num_steps] = logprobs_B.float()
        self.num_steps += 1
        self._num_tokens_R[self._going_B] = self.num_steps
        if self.num_steps == self._max_tokens:
            self._going_B = self._going_B[:0]
            return
        ended_B = torch.isin(tokens_B.long(), self._ends) | (self._limits_R[self._going_B] <= self.num_steps)
        if self._stops is not None:
            latest_BT = self._tokens_RT[self._going_B, max(0, self.num_steps - self._stops.window) : self.num_steps]
            ended_B |= torch.tensor(self._stops.ended(latest_BT.tolist()))
        if ended_B.any():
            self._leave(ended_B)

    def responses(self) -> Iterator[tuple[int, list[int], list[float]]]:
        """Yield (position in the call, tokens, log-probabilities) of every row."""
        counts, tokens, logprobs = self._num_tokens_R.tolist(), self._tokens_RT.tolist(), self._logprobs_RT.tolist()
        for index, row in enumerate(self.rows.tolist()):
            yield row, tokens[index][: counts[index]], logprobs[index][: counts[index]]

    def _leave(self, ended_B: Tensor) -> None:
        """Move the last rows into freed slots, so that the remaining rows occupy the first slots."""
        stays_B = ~ended_B
        num_left = int(stays_B.sum())
        targets, sources = ended_B[:num_left].nonzero()[:, 0], stays_B[num_left:].nonzero()[:, 0] + num_left
        stays_in = torch.arange(num_left)
        stays_in[targets] = sources
        self._going_B = self._going_B[stays_in]
        targets, sources, stays_in = to_device((targets, sources, stays_in), self.cache.tensor.device)
        if len(targets):
            self.cache.move(sources, targets, int(self._lengths_R.max()) + self.num_steps)
        self.numbers_B, self._lengths_B = self.numbers_B[stays_in], self._lengths_B[stays_in]
        self._newest_B = self._newest_B[stays_in]


def row_groups(
    prompts: Sequence[Sequence[int]],
    sampling: SamplingSettings,
    end_tokens: Sequence[int],
    layers: Any,
    num_groups: int,
    stops: StopStrings | None = None,
    at_most: Sequence[int] | None = None,
) -> list[RowGroup]:
    """Make at most `num_groups` groups of equally many rows, with prompts of similar length together, each with a
    cache.

    `at_most` is the limit on each row's new tokens, if it is not `sampling.max_new_tokens` for all.
    """
    if not prompts:  # a replica may have no prompts
        return []
    like = next(layers.parameters())
    ends = torch.tensor(end_tokens if sampling.stop_at_eos else (), dtype=torch.long)
    by_length = torch.tensor([len(prompt) for prompt in prompts]).argsort(descending=True, stable=True)
    groups = []
    for rows in (part.tolist() for part in by_length.tensor_split(min(num_groups, len(prompts)))):
        new = [sampling.max_new_tokens if at_most is None else at_most[row] for row in rows]
        length = max(len(prompts[row]) + more for row, more in zip(rows, new, strict=True))
        cache = KeyValueCache(layers, len(rows), length, like)
        groups.append(RowGroup(rows, prompts, sampling, ends, cache, stops, at_most))
    return groups
