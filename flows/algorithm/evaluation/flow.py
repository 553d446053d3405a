"""The algorithm `evaluate`: it trains no model. The named sets of its parameter `evaluation` are its calls."""

from __future__ import annotations

from pydantic import Field

from prefect_rlhf.blocks.model import Model
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.forms.reward import Reward
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.settings import Sampling, Settings


class Evaluate(Settings):
    """Settings that an evaluation's sets share."""

    sampling: Sampling = Field(default=Sampling(), description="How responses are drawn, unless a set states it.")


@rlhf_flow("evaluate")
def evaluate(actor: Model, reward: Reward | None = None, play: Play | None = None, algo: Evaluate = Evaluate()) -> None:
    """Answer the prompts of each set of `evaluation`, score the answers and record them. No model is trained."""
