"""A rank of `benchmarks.parts.orchestration`: it holds made-up rows and reports its processor time."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from prefect_rlhf.engines.rank.rank import Rank

CALL, KEYS = "generate", ("tokens", "prompt_length", "logprobs")
TOKENS, RESPONSE_TOKENS = 30, 24


class RankWithRows(Rank):
    """A rank without models."""

    def hold(self, rows: Sequence[int]) -> None:
        """Keep rows of step 1, each of 30 tokens."""
        for row in rows:
            values = (torch.zeros(TOKENS).long(), torch.tensor(TOKENS - RESPONSE_TOKENS), torch.zeros(RESPONSE_TOKENS))
            for key, value in zip(KEYS, values, strict=True):
                self.store.put(1, CALL, key, {row: value})

    def processor_seconds(self) -> float:
        """Return the processor time of this process, all of its threads included."""
        return time.process_time()
