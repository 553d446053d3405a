"""The PPO step that both sides of `ppo_step.py` do: one model, one set of prompts, one batch, one number format."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.parquet as pq

from benchmarks.beside_trl.step_work import StepWork


@dataclass(frozen=True, kw_only=True)
class PPOWork(StepWork):
    """A step: `batch_size` responses of exactly `response_tokens` tokens, then epochs * mini_batches optimizer steps.

    All four roles have the shape of the model in `model`.
    """

    batch_size: int = 32
    epochs: int = 2
    mini_batches: int = 2
    learning_rate: float = 2e-5
    kl_coefficient: float = 0.05
    plan: str = "split"  # actor and critic train at the same time

    def prompt_texts(self) -> list[str]:
        """Return the first training prompts of the file, enough for all steps."""
        table = pq.read_table(self.prompts, filters=[("split", "=", "train")])
        texts: list[str] = table["prompt"].to_pylist()
        return texts[: self.batch_size * (self.steps + 1)]
