"""The hyperparameters of Safe RLHF: PPO's, the limit on the cost, and the multiplier that enforces it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prefect_rlhf.errors.wrong_setting import not_used, wrong
from prefect_rlhf.tasks.rl.settings.online import PPO
from prefect_rlhf.tasks.settings import MOST_ROWS, Decay, Optimizer, Settings


class Lagrange(Settings):
    """The Lagrange multiplier: how much a unit of cost weighs against a unit of reward."""

    start: float = Field(1.0, gt=0, le=1e6, description="Multiplier before the first step.")
    most: float = Field(10.0, gt=0, le=1e6, description="Upper bound of the multiplier.")
    lr: float = Field(
        0.1, gt=0, le=1e3, description="Step size: log(multiplier) grows by lr * multiplier * excess cost."
    )
    smoothing: Decay = Field(0.5, description="Share of the old mean in the smoothed mean cost; 0: this step alone.")

    @model_validator(mode="after")
    def _starts_below_its_bound(self) -> Lagrange:
        if self.start > self.most:
            raise wrong(self, "start", f"at most {self.most:g}, its `most`")
        return self

    def only_at_start(self) -> tuple[str, ...]:
        """The multiplier is a state that starts at `start`."""
        return ("start",)


class SafeRLHF(PPO):
    """PPO that maximises reward while the mean cost stays below a limit (Dai et al. 2023, arXiv:2310.12773)."""

    limit: float = Field(0.0, ge=-1e6, le=1e6, description="Highest mean cost of a response, in the cost's own units.")
    lagrange: Lagrange = Field(default=Lagrange(), description="How the multiplier follows the cost.")
    ptx: float = Field(0.1, gt=0, le=1e6, description="Weight of the likelihood of `pretrain` rows.")
    ptx_batch_size: int = Field(16, ge=1, le=MOST_ROWS, description="`pretrain` rows in each step.")
    normalise_scores: Literal[False] = Field(False, description="Off: the limit is in the cost's own units.")
    score_clip: None = Field(None, description="Off: the limit is in the cost's own units.")
    cost_critic_optimizer: Optimizer = Field(
        default=Optimizer(lr=2e-5, head_lr=1e-3), description="Optimizer for the cost's value model."
    )

    @model_validator(mode="after")
    def _shares_no_trunk(self) -> SafeRLHF:
        """Refuse a setting of PPO that Safe RLHF does not use."""
        if self.value_weight != PPO.model_fields["value_weight"].default:
            raise not_used(
                "value_weight", "it weighs the values of a shared trunk, and safe-rlhf has separate value models"
            )
        return self

    @property
    def of_each_side(self) -> SafeRLHF:
        """The settings for the reward's and the cost's own advantages: only their mixture is whitened."""
        return self.model_copy(update={"whiten_advantages": False})
