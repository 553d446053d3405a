"""Modules that a page showed and that moved: an import by the old name fails with the new name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType

MOVED: Mapping[str, str] = MappingProxyType(
    {
        "prefect_rlhf.placement.cost.hardware": "prefect_rlhf.placement.cost.datasheets.hardware",
        "prefect_rlhf.placement.cost.profile": "prefect_rlhf.placement.cost.times.profile",
        "prefect_rlhf.placement.errors": "prefect_rlhf.errors.errors",
        "prefect_rlhf.placement.known_models": "prefect_rlhf.placement.models.known_models",
        "prefect_rlhf.placement.mesh": "prefect_rlhf.placement.devices.mesh",
        "prefect_rlhf.placement.model": "prefect_rlhf.placement.models.model",
    }
)
"""Old name -> new name."""


class MovedModules(MetaPathFinder):
    """The last finder of modules: it finds none, and names the new place of a moved module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Raise ImportError for a moved module."""
        if fullname in MOVED:
            raise ImportError(f"{fullname} is now {MOVED[fullname]}", name=fullname)
        return None


def announce_moves() -> None:
    """Install the finder, once."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
