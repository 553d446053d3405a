"""RLHF training as a Prefect plugin: algorithms are flows, model function calls are task runs on planned meshes.

Authors import from here, and from the modules `losses`, `computations`, `algorithms` and `rewards`. A name is loaded
when it is first used, so that ranks and planners load no more than they use; no name loads torch.

>>> from prefect_rlhf import generate, losses, rlhf_flow, train_step
>>> rlhf_flow.__module__
'prefect_rlhf.flows.algorithm.rlhf_flow'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_rlhf.door import *  # noqa: F403  the list of names stands there


def __getattr__(name: str) -> Any:
    """Return a name of the door. Raises AttributeError for any other."""
    if not name.startswith("_") and name in (door := import_module("prefect_rlhf.door")).__all__:
        return getattr(door, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of the door."""
    return list(import_module("prefect_rlhf.door").__all__)
