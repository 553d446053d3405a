"""Functions of your own that score rows: rewards and plays in a run, and a pool that calls rewards outside of a run."""

from __future__ import annotations

from prefect_rlhf.engines.functions.function import HostFunction, HostSettings
from prefect_rlhf.engines.functions.scoring.pool import HostFunctionFailed, HostPool, check_function
from prefect_rlhf.tasks.host_rewards import HostRewards, RewardFunction
from prefect_rlhf.tasks.play import Play

__all__ = [
    # settings of reward functions
    "HostRewards",
    "RewardFunction",
    "HostFunction",
    "HostSettings",
    # conversations that score themselves
    "Play",
    # reward functions outside of a run
    "HostPool",
    "check_function",
    "HostFunctionFailed",
]
