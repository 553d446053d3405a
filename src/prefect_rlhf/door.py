"""What the package shows to authors of algorithms, rewards and computations; everything else may change its place."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.blocks.rated_answers import RatedAnswers
from prefect_rlhf.engines.compute import Computed, Context, saved_state
from prefect_rlhf.engines.hosts.check import check_function
from prefect_rlhf.engines.hosts.errors import HostFunctionFailed
from prefect_rlhf.engines.hosts.function import HostFunction
from prefect_rlhf.engines.hosts.pool import HostPool
from prefect_rlhf.engines.hosts.settings import HostSettings
from prefect_rlhf.engines.loss import Loss, LossValues
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.flows.forms.reward import Reward, check_reference, with_reward_weights
from prefect_rlhf.flows.rlhf_flow import find_flow, rlhf_flow
from prefect_rlhf.flows.training.inputs import open_source
from prefect_rlhf.placement.errors import GraphError, InvalidInput, RlhfError, RunStopped
from prefect_rlhf.tasks.calls import compute, generate, inference, score, train_step
from prefect_rlhf.tasks.data.rollouts import lists, record_rollouts, text_columns, write_rows
from prefect_rlhf.tasks.host_rewards import HostRewards, RewardFunction
from prefect_rlhf.tasks.operations import computation, loss
from prefect_rlhf.tasks.rl.advantages import gae, grpo_advantages, informative, remax_advantages
from prefect_rlhf.tasks.rl.evaluation import pair_accuracy, record_evaluation, token_loss
from prefect_rlhf.tasks.rl.groups import group_scores, groups_of
from prefect_rlhf.tasks.rl.hyperparameters import GRPO, PPO, KLControl, PolicyGradient, ReMax
from prefect_rlhf.tasks.rl.importance import importance_weights
from prefect_rlhf.tasks.rl.kl import kl_estimate
from prefect_rlhf.tasks.rl.losses import (
    bradley_terry,
    log_sigmoid,
    nll,
    policy_gradient,
    ppo_clip,
    value_clip,
    weighted_policy_gradient,
)
from prefect_rlhf.tasks.rl.losses import grpo as grpo_loss
from prefect_rlhf.tasks.rl.masked import masked_mean, response_mask, row_means, row_sums, whiten
from prefect_rlhf.tasks.rl.offline_settings import DPO, KTO, SFT
from prefect_rlhf.tasks.rl.old_policy import old_policy
from prefect_rlhf.tasks.rl.policy_settings import Importance, KLTerm, Overlong
from prefect_rlhf.tasks.rl.preference_evaluation import (
    kto_kl,
    label_accuracy,
    mismatched_answers,
    preference_accuracy,
)
from prefect_rlhf.tasks.rl.preference_losses import dpo as dpo_loss
from prefect_rlhf.tasks.rl.preference_losses import implicit_rewards
from prefect_rlhf.tasks.rl.preference_losses import kto as kto_loss
from prefect_rlhf.tasks.rl.rewards import compare_logprobs, kl_penalised_rewards
from prefect_rlhf.tasks.rl.safety import (
    kl_penalised_costs,
    lagrange_advantages,
    lagrange_multiplier,
    record_safe_evaluation,
)
from prefect_rlhf.tasks.rl.safety_settings import Lagrange, SafeRLHF
from prefect_rlhf.tasks.select import select
from prefect_rlhf.tasks.settings import Optimizer, Sampling, Settings, Staleness, Update
from prefect_rlhf.tasks.terms import Terms

if TYPE_CHECKING:
    from prefect_rlhf.flows.dpo import dpo
    from prefect_rlhf.flows.grpo import grpo
    from prefect_rlhf.flows.kto import kto
    from prefect_rlhf.flows.local_run import run
    from prefect_rlhf.flows.ppo import ppo
    from prefect_rlhf.flows.remax import remax
    from prefect_rlhf.flows.reward import reward
    from prefect_rlhf.flows.run_result import PlannedRun, RunResult
    from prefect_rlhf.flows.safe_rlhf import safe_rlhf
    from prefect_rlhf.flows.sft import sft

_LOADED_LATER: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("dpo", "grpo", "kto", "ppo", "remax", "reward", "safe_rlhf", "sft")}
    | {"run": "local_run", "RunResult": "run_result", "PlannedRun": "run_result"}
)
"""Names that only a program which starts runs asks for, with their files in flows: ranks import the door too."""


def __getattr__(name: str) -> Any:
    """Return a name that is loaded when it is first asked for."""
    if name in _LOADED_LATER:
        return getattr(import_module(f"prefect_rlhf.flows.{_LOADED_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    # the words of a flow's body
    "rlhf_flow",
    "generate",
    "inference",
    "score",
    "compute",
    "select",
    "train_step",
    # its parameters
    "Model",
    "Prompts",
    "Preferences",
    "Chats",
    "RatedAnswers",
    "Reward",
    "HostRewards",
    "RewardFunction",
    "Staleness",
    # settings
    "Settings",
    "Sampling",
    "Optimizer",
    "Update",
    "KLControl",
    "KLTerm",
    "Lagrange",
    "Importance",
    "Overlong",
    "PolicyGradient",
    "PPO",
    "SafeRLHF",
    "GRPO",
    "ReMax",
    "DPO",
    "SFT",
    "KTO",
    # losses and computations of your own
    "loss",
    "computation",
    "Batch",
    "Computed",
    "Context",
    "Loss",
    "LossValues",
    "Terms",
    "saved_state",
    # built-in losses
    "ppo_clip",
    "value_clip",
    "nll",
    "policy_gradient",
    "weighted_policy_gradient",
    "grpo_loss",
    "dpo_loss",
    "kto_loss",
    "bradley_terry",
    # built-in computations
    "gae",
    "grpo_advantages",
    "informative",
    "remax_advantages",
    "kl_penalised_rewards",
    "kl_penalised_costs",
    "lagrange_multiplier",
    "lagrange_advantages",
    "compare_logprobs",
    "importance_weights",
    "record_rollouts",
    "record_evaluation",
    "record_safe_evaluation",
    "pair_accuracy",
    "token_loss",
    "preference_accuracy",
    "label_accuracy",
    "mismatched_answers",
    "kto_kl",
    # what they are made of
    "log_sigmoid",
    "kl_estimate",
    "implicit_rewards",
    "response_mask",
    "masked_mean",
    "row_means",
    "row_sums",
    "whiten",
    "groups_of",
    "group_scores",
    "lists",
    "text_columns",
    "write_rows",
    # helpers of a body
    "old_policy",
    "check_reference",
    "with_reward_weights",
    # runs from Python
    "run",
    "RunResult",
    "PlannedRun",
    "RunStopped",
    "ppo",
    "grpo",
    "remax",
    "dpo",
    "kto",
    "sft",
    "reward",
    "safe_rlhf",
    # what a notebook or a test asks for
    "find_flow",
    "open_source",
    "HostFunction",
    "HostPool",
    "HostSettings",
    "HostFunctionFailed",
    "check_function",
    "RlhfError",
    "GraphError",
    "InvalidInput",
]
