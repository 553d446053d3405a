"""The PPO step that both sides of `ppo_step.py` do: one model, one set of prompts, one batch, one number format."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq


@dataclass(frozen=True)
class PPOWork:
    """A step: `batch_size` responses of exactly `response_tokens` tokens, then epochs * mini_batches optimizer steps.

    All four roles have the shape of the model in `model`; bfloat16 compute; `threads` in all.
    """

    model: str = ".rlhf/models/smollm2"
    prompts: str = ".rlhf/data/prompts.parquet"
    batch_size: int = 32
    response_tokens: int = 24
    epochs: int = 2
    mini_batches: int = 2
    learning_rate: float = 2e-5
    kl_coefficient: float = 0.05
    steps: int = 4  # measured, after one that is not
    threads: int = 2
    plan: str = "split"  # of ours: actor and critic train at the same time

    def prompt_texts(self) -> list[str]:
        """Return the first training prompts of the file, enough for all steps."""
        table = pq.read_table(self.prompts, filters=[("split", "=", "train")])
        texts: list[str] = table["prompt"].to_pylist()
        return texts[: self.batch_size * (self.steps + 1)]


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step, and of each of its calls; `details` are numbers of one side alone."""

    seconds_per_step: float
    seconds_per_call: Mapping[str, float]
    details: Mapping[str, float] = field(default_factory=dict)


def check_files(work: PPOWork) -> None:
    """Exit with one line unless the model and the prompts are there."""
    for path in (work.model, work.prompts):
        if not Path(path).exists():
            sys.exit(f"{path} does not exist; `make demo` writes it, or name another with --model and --prompts")
