"""Python functions as rewards: their settings in a run, and a pool of processes that calls them outside of a run."""

from __future__ import annotations

from prefect_rlhf.engines.functions.function import HostFunction, HostSettings
from prefect_rlhf.engines.functions.pool import HostFunctionFailed, HostPool, check_function
from prefect_rlhf.tasks.host_rewards import HostRewards, RewardFunction

__all__ = [
    # settings of reward functions
    "HostRewards",
    "RewardFunction",
    "HostFunction",
    "HostSettings",
    # reward functions outside of a run
    "HostPool",
    "check_function",
    "HostFunctionFailed",
]
