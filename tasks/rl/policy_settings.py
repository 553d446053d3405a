"""Settings of policy optimisation without a critic that are groups of their own: KL, mismatch, overlong responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prefect_rlhf.placement.wrong_setting import not_used, wrong
from prefect_rlhf.tasks.settings import Settings

Estimator = Literal["k1", "k2", "k3"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"]
PolicyLoss = Literal["clip", "gspo", "cispo"]
MeanOver = Literal["tokens", "rows", "groups"] | Annotated[float, Field(gt=0, le=1e9)]

CLIPS: dict[PolicyLoss, tuple[float, float]] = {"clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
"""Low and high of each loss where the settings are empty: Shao et al. 2024; Zheng et al. 2025, section 5.1; for cispo
no lower bound, as in the paper, and the upper one of Khatri et al. 2025 (arXiv:2510.13786)."""


class KLTerm(Settings):
    """The KL to the reference model in an algorithm without a critic; estimates of a token by Schulman (2020)."""

    coefficient: float = Field(0.04, ge=0, le=1e6, description="Weight of a nat of KL; 0 needs no reference model.")
    estimator: Estimator = Field(
        "k3", description="Per token: k1 is the log-ratio, k2 half its square, k3 never negative and unbiased."
    )
    place: Literal["loss", "reward"] = Field("loss", description="Added to the loss, or taken off the reward.")

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KLTerm:
        """Refuse k1 in a loss: its gradient is that of a token's log-probability, which is zero on average."""
        if self.in_loss and self.estimator == "k1":
            raise wrong("estimator", "k2, k3, or place: reward: k1 in a loss has a gradient of zero on average")
        return self

    @property
    def in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether rewards are lower for KL."""
        return self.coefficient > 0 and self.place == "reward"


class Importance(Settings):
    """Weights that correct for the difference between the engine that generates and the one that trains.

    A weight is the probability under training over that under generation (Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training").
    """

    level: Literal["token", "sequence"] = Field("token", description="A token's own ratio, or its whole response's.")
    beyond: Literal["truncate", "mask"] = Field(
        "truncate", description="What a weight beyond the bounds becomes: the bound (TIS), or 0 (MIS)."
    )
    lowest: float = Field(0.0, ge=0, le=1, description="Lower bound of a weight.")
    highest: float = Field(2.0, ge=1, le=1e6, description="Upper bound of a weight.")


class Overlong(Settings):
    """What becomes of responses that do not end within `max_new_tokens` (Yu et al. 2025, arXiv:2503.14476)."""

    mask: bool = Field(False, description="Leave a response that was cut off out of the loss.")
    buffer: int | None = Field(
        None, ge=1, le=1 << 20, description="Tokens before the limit over which a penalty grows; empty: no penalty."
    )
    penalty: float = Field(1.0, gt=0, le=1e6, description="Score lost at the limit; with a buffer.")

    @model_validator(mode="after")
    def _penalty_has_a_buffer(self) -> Overlong:
        if self.buffer is None and self.penalty != 1.0:
            raise not_used("penalty", "it grows over the tokens of buffer, which is not set", "set buffer")
        return self
