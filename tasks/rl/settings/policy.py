"""Groups of settings for policy optimisation without a critic: KL, engine mismatch, overlong responses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prefect_rlhf.errors.wrong_setting import not_used, wrong
from prefect_rlhf.tasks.settings import Settings

Estimator = Literal["k1", "k2", "k3"]
Advantage = Literal["grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "turns"]
PolicyLoss = Literal["clip", "gspo", "cispo"]
MeanOver = Literal["tokens", "rows", "groups"] | Annotated[float, Field(gt=0, le=1e9)]

CLIPS: dict[PolicyLoss, tuple[float, float]] = {"clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
"""Lower and upper clip of each loss if the settings are empty: Shao et al. 2024; Zheng et al. 2025, section 5.1. Cispo
has no lower bound, as in the paper, and the upper bound of Khatri et al. 2025 (arXiv:2510.13786)."""


class KLTerm(Settings):
    """How an algorithm without a critic uses the KL to the reference model. Estimators are Schulman's (2020)."""

    coefficient: float = Field(
        0.04, ge=0, le=1e6, description="Weight per nat of KL; with 0 you need no reference model."
    )
    estimator: Estimator = Field(
        "k3", description="Per token: k1 is the log-ratio, k2 half its square, k3 never negative and unbiased."
    )
    place: Literal["loss", "reward"] = Field("loss", description="Add KL to the loss, or subtract it from the reward.")

    @model_validator(mode="after")
    def _has_a_gradient(self) -> KLTerm:
        """Refuse k1 in a loss: its gradient is the gradient of a token's log-probability, which is zero on average."""
        if self.in_loss and self.estimator == "k1":
            raise wrong(self, "estimator", "k2, k3, or place: reward: k1 in a loss has a gradient of zero on average")
        return self

    @model_validator(mode="after")
    def _zero_has_no_kl(self) -> KLTerm:
        """Refuse settings that a coefficient of 0 leaves without effect."""
        for name in ("estimator", "place"):
            if self.coefficient == 0 and getattr(self, name) != type(self).model_fields[name].default:
                raise not_used(name, "a coefficient of 0 has no KL", "set coefficient above 0")
        return self

    @property
    def in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.coefficient > 0 and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether KL is subtracted from rewards."""
        return self.coefficient > 0 and self.place == "reward"


class Importance(Settings):
    """Importance weights, for when generation and training engines give a token different probabilities.

    A weight is the training engine's probability divided by the generation engine's (Yao et al. 2025, "Your efficient
    RL framework secretly brings you off-policy RL training").
    """

    level: Literal["token", "sequence"] = Field("token", description="Ratio of each token, or of its whole response.")
    beyond: Literal["truncate", "mask"] = Field(
        "truncate", description="A weight beyond the bounds becomes the bound (truncate, TIS) or 0 (mask, MIS)."
    )
    lowest: float = Field(0.0, ge=0, le=1, description="Lower bound of a weight.")
    highest: float = Field(2.0, ge=1, le=1e6, description="Upper bound of a weight.")


class Overlong(Settings):
    """What happens to responses that do not end within `max_new_tokens` (Yu et al. 2025, arXiv:2503.14476)."""

    mask: bool = Field(False, description="Exclude truncated responses from the loss.")
    buffer: int | None = Field(
        None, ge=1, le=1 << 20, description="Tokens before the limit over which a penalty grows; empty: no penalty."
    )
    penalty: float = Field(1.0, gt=0, le=1e6, description="With a buffer: score lost at the limit.")

    @model_validator(mode="after")
    def _penalty_has_a_buffer(self) -> Overlong:
        if self.buffer is None and self.penalty != 1.0:
            raise not_used("penalty", "it grows over the tokens of buffer, which is not set", "set buffer")
        return self
