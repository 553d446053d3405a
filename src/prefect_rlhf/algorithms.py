"""The built-in algorithms, each a flow that is loaded when it is first used, and the search for other flows."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow

if TYPE_CHECKING:
    from prefect_rlhf.flows.dpo import dpo
    from prefect_rlhf.flows.grpo import grpo
    from prefect_rlhf.flows.kto import kto
    from prefect_rlhf.flows.ppo import ppo
    from prefect_rlhf.flows.remax import remax
    from prefect_rlhf.flows.reward import reward
    from prefect_rlhf.flows.safe_rlhf import safe_rlhf
    from prefect_rlhf.flows.sft import sft

__all__ = [
    # built-in algorithms
    "ppo",
    "grpo",
    "remax",
    "dpo",
    "kto",
    "sft",
    "reward",
    "safe_rlhf",
    # other algorithms
    "find_flow",
]


def __getattr__(name: str) -> Any:
    """Return the flow of a built-in algorithm. Raises AttributeError for any other name."""
    if name in __all__:
        return getattr(import_module(f"prefect_rlhf.flows.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
