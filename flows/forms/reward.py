"""The parameter that scores responses: a reward model or Python functions, told apart by their keys."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from prefect_rlhf.blocks.model import Model
from prefect_rlhf.errors.errors import Missing, NotUsed
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.rl.settings.online import GRPO
from prefect_rlhf.tasks.tracing.calls import score
from prefect_rlhf.tasks.tracing.trace import RowsHandle


def _kind(value: Any) -> str:
    is_functions = "functions" in value if isinstance(value, dict) else isinstance(value, HostRewards)
    return "<functions>" if is_functions else "<model>"  # errors omit text in angle brackets


Reward = Annotated[Annotated[Model, Tag("<model>")] | Annotated[HostRewards, Tag("<functions>")], Discriminator(_kind)]
"""What a parameter `reward` accepts: a Model, or a HostRewards, which has `functions`."""


def with_reward_weights(algo: GRPO, reward: Model | HostRewards | None) -> GRPO:
    """Copy the reward functions' weights into the settings, for an advantage that applies them itself (gdpo).

    Raises InvalidInput if you set weights anywhere but at the functions.
    """
    if algo.reward_weights:
        raise NotUsed("algo.reward_weights", algo.reward_weights, "each entry of reward.functions has its own weight")
    if algo.advantage != "gdpo" or not isinstance(reward, HostRewards):
        return algo
    weights = {name: function.weight for name, function in reward.functions.items()}
    return algo.model_copy(update={"reward_weights": weights})


def check_scorer(reward: Model | HostRewards | None, play: Play | None, algo: GRPO | None = None) -> None:
    """Raise InvalidInput unless exactly one of reward and play scores responses, and for settings that no play has."""
    if reward is None and play is None:
        raise Missing("reward", "a reward model or functions, or a play, which scores its own rows")
    if reward is not None and play is not None:
        raise NotUsed("reward", getattr(reward, "path", "functions"), "play scores its own rows")
    if play is None and algo is not None and algo.advantage == "turns":
        raise NotUsed("algo.advantage", algo.advantage, "without a play, a response is a single turn; set rloo")
    if play is None or algo is None:
        return
    if algo.overlong.buffer is not None:
        raise NotUsed("algo.overlong.buffer", algo.overlong.buffer, "play.max_tokens limits a play's rows")
    if algo.advantage == "gdpo":
        raise NotUsed("algo.advantage", algo.advantage, "a play returns a single score, and gdpo needs several rewards")


def scored(
    reward: Model | HostRewards | None, rollout: RowsHandle, *, every: int | None = None, name: str | None = None
) -> RowsHandle:
    """Score a rollout with a reward; without a reward, its play has scored it already and it is returned unchanged."""
    return rollout if reward is None else score(reward, rollout, every=every, name=name)


def check_reference(ref: Model | None, kl_coefficient: float) -> None:
    """Raise InvalidInput if a reference model is missing. With a coefficient of 0, it only measures the KL."""
    if ref is None and kl_coefficient > 0:
        raise Missing("ref", f"a model, since algo.kl.coefficient is {kl_coefficient:g}; or set that to 0")
