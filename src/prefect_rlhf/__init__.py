"""RLHF training as a Prefect plugin: algorithms are flows, model function calls are task runs on planned meshes.

Authors import from here, and from the modules `losses`, `computations`, `algorithms` and `rewards`. A name is loaded
when it is first used, so that ranks and planners load no more than they use; no name loads torch.

>>> from prefect_rlhf import generate, losses, rlhf_flow, train_step
>>> rlhf_flow.__module__
'prefect_rlhf.flows.algorithm.rlhf_flow'
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefect_rlhf.door import *  # noqa: F403  the list of names stands there


def __getattr__(name: str) -> Any:
    """Return a name of the door. Raises AttributeError for any other, with the module that has it.

    Python shows a similar name below the error.
    """
    hint = ""
    if name == "__all__":  # of `from prefect_rlhf import *`
        return list(_door().__all__)
    if not name.startswith("_"):
        door = _door()
        if name in door.__all__:
            return getattr(door, name)
        is_room = find_spec(f"{__name__}.{name}") is not None  # which the import of a room asks for first
        modules = () if is_room else door.MODULES
        inside = [f"{__name__}.{module}" for module in modules if name in getattr(door, module).__all__]
        hint = f"; it is in {' and '.join(inside)}" if inside else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    """Return the names of the door."""
    return list(_door().__all__)


def _door() -> ModuleType:
    """Import the door, which imports Prefect; the log handlers of the program stay as they are.

    Prefect configures logging when it is imported. It closes all handlers, so that a file that was opened with mode `w`
    gets no further line. It takes handlers without a formatter from the root logger, and adds its own, which here goes
    to its own logger: otherwise a later `logging.basicConfig` of the program would do nothing.
    """
    if "prefect" in sys.modules:
        return import_module("prefect_rlhf.door")
    root, known = logging.getLogger(), logging._handlerList[:]  # type: ignore[attr-defined]  # closed by dictConfig
    handlers, level = root.handlers[:], root.level
    logging._handlerList.clear()  # type: ignore[attr-defined]
    try:
        return import_module("prefect_rlhf.door")
    finally:
        logging._handlerList[:0] = known  # type: ignore[attr-defined]
        for handler in [each for each in root.handlers if each not in handlers]:
            logging.getLogger("prefect").addHandler(handler)
        root.handlers[:] = handlers
        root.setLevel(level)
