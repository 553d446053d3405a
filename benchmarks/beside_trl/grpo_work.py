"""The GRPO step that both sides of `grpo_step.py` do, the reward included."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.beside_trl.step_work import StepWork


@dataclass(frozen=True, kw_only=True)
class GRPOWork(StepWork):
    """A step: `samples` responses of exactly `response_tokens` tokens to each of `batch_size` prompts, then training.

    Training is epochs * mini_batches optimizer steps of AdamW. One of each is the default of both sides.
    """

    batch_size: int = 4
    samples: int = 8
    epochs: int = 1
    mini_batches: int = 1
    learning_rate: float = 1e-6
    plan: str = "flattening"

    @property
    def rows(self) -> int:
        """Responses of a step."""
        return self.batch_size * self.samples

    def prompt_texts(self) -> list[str]:
        """Return the first training prompts of the file: as many as all steps need."""
        table = pq.read_table(self.prompts, filters=[("split", "=", "train")])
        texts: list[str] = table["prompt"].to_pylist()
        return texts[: self.batch_size * (self.steps + 1)]


def vowels(completions: list[str], **_: Any) -> list[float]:
    """Score each text by its share of vowels, as TRL calls a reward."""
    return [sum(text.count(vowel) for vowel in "aeiou") / max(1, len(text)) for text in completions]


REWARD = f"{Path(__file__).resolve()}:vowels"
