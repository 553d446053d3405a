"""The hyperparameters of algorithms that learn from existing rows, without generating responses."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field, model_validator

from prefect_rlhf.errors.wrong_setting import not_used, wrong
from prefect_rlhf.tasks.settings import MOST_ROWS, MOST_STEPS, MovingReference, Optimizer, Settings, Update

PreferenceLoss = Literal["dpo", "cdpo", "robust", "ipo", "simpo"]
BETAS: Mapping[PreferenceLoss, float] = MappingProxyType(
    {"dpo": 0.1, "cdpo": 0.1, "robust": 0.1, "ipo": 0.1, "simpo": 2.0}
)
"""The default of beta for each loss."""
REFERENCE_FREE: tuple[PreferenceLoss, ...] = ("simpo",)
WITH_WRONG_LABELS: tuple[PreferenceLoss, ...] = ("cdpo", "robust")


class SFT(Settings):
    """Supervised fine-tuning on answers that people or better models wrote."""

    batch_size: int = Field(16, ge=1, le=MOST_ROWS, description="Rows in each step.")
    mean_over: Literal["tokens", "rows"] = Field(
        "tokens", description="The loss is a mean over all trained tokens, or over the mean of each row."
    )
    evaluate_every: int = Field(10, ge=1, le=MOST_STEPS, description="Steps between evaluations on the held-out rows.")
    update: Update = Field(default=Update(), description="Epochs and mini-batches of a train_step.")
    optimizer: Optimizer = Field(default=Optimizer(lr=2e-5, warmup_steps=5), description="Optimizer of the model.")


class DPO(Settings):
    """Direct preference optimisation (Rafailov et al. 2023, arXiv:2305.18290) and related losses."""

    loss: PreferenceLoss = Field(
        "dpo", description="cdpo and robust assume wrong labels, ipo aims at a fixed margin, simpo has no reference."
    )
    batch_size: int = Field(16, ge=1, le=MOST_ROWS, description="Pairs in each step.")
    beta: float | None = Field(
        None, gt=0, le=1e6, description="Strength of the pull to the reference; empty: 0.1, simpo 2."
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="With cdpo and robust: assumed share of wrong labels."
    )
    margin: float | None = Field(
        None, ge=0, le=1e6, description="With simpo: target margin of the chosen answer; empty: 1."
    )
    evaluate_every: int = Field(10, ge=1, le=MOST_STEPS, description="Steps between evaluations on the held-out pairs.")
    follow: MovingReference = Field(default=MovingReference(), description="A reference that follows the policy.")
    update: Update = Field(default=Update(), description="Epochs and mini-batches of a train_step.")
    optimizer: Optimizer = Field(default=Optimizer(lr=1e-6), description="Optimizer of the policy.")

    @property
    def strength(self) -> float:
        """`beta`, or the loss's default if you leave it empty.

        >>> DPO().strength, DPO(loss="simpo").strength, DPO(beta=0.5).strength
        (0.1, 2.0, 0.5)
        """
        return BETAS[self.loss] if self.beta is None else self.beta

    @property
    def target_margin(self) -> float:
        """The target for the difference in reward: `margin` or 1.0 for simpo, 0.0 for other losses."""
        return 0.0 if self.loss != "simpo" else 1.0 if self.margin is None else self.margin

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs a reference model's log-probabilities."""
        return self.loss not in REFERENCE_FREE

    @model_validator(mode="after")
    def _makes_sense(self) -> DPO:
        """Refuse a setting that has no effect because of another setting."""
        if self.label_smoothing > 0 and self.loss not in WITH_WRONG_LABELS:
            raise not_used("label_smoothing", f"loss {self.loss} does not read it", "set loss: cdpo or robust")
        if self.label_smoothing == 0 and self.loss in WITH_WRONG_LABELS:
            raise wrong(self, "label_smoothing", f"a share above 0, or loss: dpo, which equals {self.loss} without it")
        if self.margin is not None and self.loss != "simpo":
            raise not_used("margin", f"loss {self.loss} does not read it", "set loss: simpo")
        return self


class KTO(Settings):
    """Kahneman-Tversky optimisation: learn from answers that are each rated good or bad, without pairs.

    Ethayarajh et al. 2024, arXiv:2402.01306.
    """

    batch_size: int = Field(32, ge=2, le=MOST_ROWS, description="Answers in each step.")
    beta: float = Field(0.1, gt=0, le=1e6, description="Strength of the pull to the reference model.")
    good_weight: float = Field(1.0, gt=0, le=1e6, description="Weight of a good answer's loss.")
    bad_weight: float = Field(1.0, gt=0, le=1e6, description="Weight of a bad answer's loss.")
    evaluate_every: int = Field(
        10, ge=1, le=MOST_STEPS, description="Steps between evaluations on the held-out answers."
    )
    follow: MovingReference = Field(default=MovingReference(), description="A reference that follows the policy.")
    update: Update = Field(default=Update(), description="Epochs and mini-batches of a train_step.")
    optimizer: Optimizer = Field(default=Optimizer(lr=1e-6), description="Optimizer of the policy.")
