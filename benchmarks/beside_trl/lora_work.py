"""The GRPO step that all sides of `lora_step.py` do: with a reference, and with an adapter on every matrix or none."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.beside_trl.grpo_work import GRPOWork


@dataclass(frozen=True, kw_only=True)
class LoraWork(GRPOWork):
    """A GRPO step whose loss has a KL term; it trains an adapter of this rank, or all weights if the rank is 0."""

    rank: int = 32
    kl_coefficient: float = 0.01
    learning_rate: float = 1e-5
