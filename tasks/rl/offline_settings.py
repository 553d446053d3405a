"""The hyperparameters of algorithms that learn from rows that are there, without responses of their own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prefect_rlhf.tasks.settings import MOST_ROWS, MOST_STEPS, Optimizer, Settings, Update


class SFT(Settings):
    """Supervised fine-tuning: the likelihood of answers that people, or better models, wrote."""

    batch_size: int = Field(16, ge=1, le=MOST_ROWS, description="Rows in each step.")
    mean_over: Literal["tokens", "rows"] = Field(
        "tokens", description="The loss is a mean over all tokens that are learnt, or over rows of each one's mean."
    )
    evaluate_every: int = Field(10, ge=1, le=MOST_STEPS, description="Steps between evaluations on the held-out rows.")
    update: Update = Field(default=Update(), description="How a train_step walks the rows.")
    optimizer: Optimizer = Field(default=Optimizer(lr=2e-5, warmup_steps=5), description="Optimizer of the model.")
