"""The settings a person gives an algorithm, typed, so that the UI shows a form and a misspelt key is refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Staleness = Annotated[
    int, Field(ge=0, description="Steps by which responses may be older than the newest weights; 0 is on-policy.")
]
"""1 lets the responses of the next step be made while this one's are trained on."""


class Settings(BaseModel):
    """Base of every group of settings: frozen, and no key is ever ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Sampling(Settings):
    """Settings of how responses are drawn."""

    max_new_tokens: int = Field(24, ge=1, description="Longest response, in tokens.")
    temperature: float = Field(1.0, ge=0, le=2, description="0 is greedy; vLLM takes at most 2.")
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; 1 keeps the whole distribution.")
    stop_at_eos: bool = Field(True, description="End a response at the end-of-sequence token.")

    def greedy(self) -> Sampling:
        """Return settings with the same lengths that always take the likeliest token."""
        return self.model_copy(update={"temperature": 0.0, "top_p": 1.0})


class Optimizer(Settings):
    """AdamW, with linear warm-up."""

    lr: float = Field(1e-5, gt=0, description="Learning rate.")
    head_lr: float | None = Field(None, gt=0, description="Learning rate of a scalar head; the same when empty.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="Decay of the two moments.")
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this global norm.")
    warmup_steps: int = Field(0, ge=0, description="Optimizer steps until the learning rate is reached.")


class Update(Settings):
    """The walk of a train_step over the rows of one iteration."""

    epochs: int = Field(1, ge=1, description="Passes over the rows.")
    mini_batches: int = Field(1, ge=1, description="Optimizer steps per pass.")
