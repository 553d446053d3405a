"""What the package offers to authors of algorithms, rewards and computations; everything else may move."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from prefect_rlhf.blocks.adapter import Adapter
from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import Preferences, Prompts
from prefect_rlhf.blocks.model import Model
from prefect_rlhf.blocks.rated_answers import RatedAnswers
from prefect_rlhf.engines.compute import Computed, Context, saved_state
from prefect_rlhf.engines.losses.protocol import LossValues
from prefect_rlhf.engines.rows import Batch
from prefect_rlhf.errors.errors import GraphError, InvalidInput, RlhfError, RunStopped
from prefect_rlhf.flows.algorithm.rlhf_flow import rlhf_flow
from prefect_rlhf.flows.forms.reward import Reward
from prefect_rlhf.flows.training.inputs import open_source
from prefect_rlhf.tasks.rl.settings.offline import DPO, KTO, SFT
from prefect_rlhf.tasks.rl.settings.online import GRPO, PPO, KLControl, PolicyGradient, ReMax
from prefect_rlhf.tasks.rl.settings.policy import Importance, KLTerm, Overlong
from prefect_rlhf.tasks.rl.settings.safety import SafeRLHF
from prefect_rlhf.tasks.settings import Optimizer, Sampling, Settings, Staleness, Update
from prefect_rlhf.tasks.tracing.calls import compute, follow, generate, inference, score, train_step
from prefect_rlhf.tasks.tracing.operations import computation, loss
from prefect_rlhf.tasks.tracing.select import select

if TYPE_CHECKING:
    from prefect_rlhf import algorithms, computations, losses, rewards
    from prefect_rlhf.flows.algorithm.local_run import run
    from prefect_rlhf.flows.algorithm.run_result import PlannedRun, RunResult
    from prefect_rlhf.flows.algorithm.run_table import runs

MODULES = ("losses", "computations", "algorithms", "rewards")
"""Modules with more public names."""
_LOADED_LATER: Mapping[str, str] = MappingProxyType(
    {
        "run": "prefect_rlhf.flows.algorithm.local_run",
        "runs": "prefect_rlhf.flows.algorithm.run_table",
        "RunResult": "prefect_rlhf.flows.algorithm.run_result",
        "PlannedRun": "prefect_rlhf.flows.algorithm.run_result",
    }
)
"""Names that only programs that start runs need, with their modules, because ranks import the door too."""


def __getattr__(name: str) -> Any:
    """Return a name that is loaded when it is first used. Raises AttributeError for any other."""
    if name in MODULES:
        return import_module(f"prefect_rlhf.{name}")
    if name in _LOADED_LATER:
        return getattr(import_module(_LOADED_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    # the calls of a flow's body
    "rlhf_flow",
    "generate",
    "inference",
    "score",
    "compute",
    "select",
    "train_step",
    "follow",
    # its parameters
    "Model",
    "Adapter",
    "Prompts",
    "Preferences",
    "Chats",
    "RatedAnswers",
    "Reward",
    "Staleness",
    # settings
    "Settings",
    "Sampling",
    "Optimizer",
    "Update",
    "KLControl",
    "KLTerm",
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
    "LossValues",
    "saved_state",
    # modules with built-in losses, computations and algorithms, and with Python functions as rewards
    "losses",
    "computations",
    "algorithms",
    "rewards",
    # runs from Python
    "run",
    "runs",
    "RunResult",
    "PlannedRun",
    "RunStopped",
    "open_source",
    # errors
    "RlhfError",
    "GraphError",
    "InvalidInput",
]
