"""The built-in computations, as in `compute(computations.gae, rewards, values, settings=algo)`, and their parts.

>>> from prefect_rlhf import computations
>>> computations.gae.outputs
('advantages', 'returns', 'row_weights')
"""

from __future__ import annotations

from prefect_rlhf.flows.forms.reward import check_reference, with_reward_weights
from prefect_rlhf.tasks.data.rollouts import lists, record_rollouts, text_columns, write_rows
from prefect_rlhf.tasks.rl.evaluation.held_out import pair_accuracy, record_evaluation, token_loss
from prefect_rlhf.tasks.rl.gae import gae, remax_advantages
from prefect_rlhf.tasks.rl.group_advantages import grpo_advantages, informative, turn_advantages
from prefect_rlhf.tasks.rl.groups import group_scores, groups_of
from prefect_rlhf.tasks.rl.importance import importance_weights
from prefect_rlhf.tasks.rl.kl import kl_estimate
from prefect_rlhf.tasks.rl.masked import masked_mean, response_mask, row_means, row_sums, whiten
from prefect_rlhf.tasks.rl.old_policy import old_policy
from prefect_rlhf.tasks.rl.preference_evaluation import kto_kl, label_accuracy, mismatched_answers, preference_accuracy
from prefect_rlhf.tasks.rl.rewards import compare_logprobs, kl_penalised_rewards, mean_scores
from prefect_rlhf.tasks.rl.safety import (
    kl_penalised_costs,
    lagrange_advantages,
    lagrange_multiplier,
    record_safe_evaluation,
)
from prefect_rlhf.tasks.rl.settings.safety import Lagrange

__all__ = [
    # advantages, rewards and costs
    "gae",
    "grpo_advantages",
    "remax_advantages",
    "kl_penalised_rewards",
    "kl_penalised_costs",
    "lagrange_multiplier",
    "lagrange_advantages",
    "importance_weights",
    "mean_scores",
    # selected rows and new rows
    "informative",
    "mismatched_answers",
    "kto_kl",
    # metrics and files
    "compare_logprobs",
    "record_rollouts",
    "record_evaluation",
    "record_safe_evaluation",
    "pair_accuracy",
    "token_loss",
    "preference_accuracy",
    "label_accuracy",
    # parts of a computation
    "turn_advantages",
    "kl_estimate",
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
    # parts of a flow's body
    "old_policy",
    "check_reference",
    "with_reward_weights",
    # settings of a multiplier
    "Lagrange",
]
