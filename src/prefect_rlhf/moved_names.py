"""Names that moved from `prefect_rlhf` to its modules. They still work in version 0.1, with a warning."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

from prefect_rlhf.files.modules import IN_RANK

_MOVED: Mapping[str, str] = MappingProxyType(
    {
        "losses": """Loss Terms bradley_terry implicit_rewards log_sigmoid nll policy_gradient ppo_clip value_clip
            weighted_policy_gradient""",
        "computations": """Lagrange check_reference compare_logprobs gae group_scores groups_of grpo_advantages
            importance_weights informative kl_estimate kl_penalised_costs kl_penalised_rewards kto_kl label_accuracy
            lagrange_advantages lagrange_multiplier lists masked_mean mismatched_answers old_policy pair_accuracy
            preference_accuracy record_evaluation record_rollouts record_safe_evaluation remax_advantages
            response_mask row_means row_sums text_columns token_loss whiten with_reward_weights write_rows""",
        "algorithms": "dpo find_flow grpo kto ppo remax reward safe_rlhf sft",
        "rewards": "HostFunction HostFunctionFailed HostPool HostRewards HostSettings RewardFunction check_function",
    }
)
"""Names that are the same in their module."""
NEW_NAMES: Mapping[str, str] = MappingProxyType(
    {name: f"{module}.{name}" for module, names in _MOVED.items() for name in names.split()}
    | {f"{loss}_loss": f"losses.{loss}" for loss in ("grpo", "dpo", "kto")}
)
"""The new name for each old name; both without `prefect_rlhf.`."""


@cache
def find_moved(name: str) -> Any:
    """Return the value of an old name. The first use in a process warns with the new name, except in a rank.

    The category is FutureWarning, because Python hides a DeprecationWarning of an imported file.
    """
    module, _, new = NEW_NAMES[name].partition(".")
    if IN_RANK not in os.environ:
        text = f"prefect_rlhf.{name} moved: write prefect_rlhf.{module}.{new}; version 0.2 will not have the old name"
        warnings.warn(text, FutureWarning, stacklevel=3)
    return getattr(import_module(f"prefect_rlhf.{module}"), new)
