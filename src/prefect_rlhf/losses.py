"""The built-in losses of a `train_step`, as in `losses.grpo(algo).on(rollout, advantages)`, and their parts.

>>> from prefect_rlhf import GRPO, losses
>>> losses.grpo(GRPO()).operation.name
'grpo'
"""

from __future__ import annotations

from prefect_rlhf.engines.losses.protocol import Loss
from prefect_rlhf.tasks.rl.losses import (
    bradley_terry,
    grpo,
    log_sigmoid,
    nll,
    policy_gradient,
    ppo_clip,
    value_clip,
    weighted_policy_gradient,
)
from prefect_rlhf.tasks.rl.preference_losses import dpo, implicit_rewards, kto
from prefect_rlhf.tasks.tracing.terms import Terms

__all__ = [
    # built-in losses
    "ppo_clip",
    "value_clip",
    "nll",
    "policy_gradient",
    "weighted_policy_gradient",
    "grpo",
    "dpo",
    "kto",
    "bradley_terry",
    # parts of a loss
    "log_sigmoid",
    "implicit_rewards",
    # types of losses
    "Loss",
    "Terms",
]
