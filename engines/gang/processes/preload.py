"""Imports that ranks need for their plan's engines, done once in the process that forks the ranks.

Importing must start no thread and run no tensor operation, because neither survives a fork.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain

from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.plan import EngineKind

_OF_ALL = (
    "torch",
    "torch.distributed",
    "transformers",
    "safetensors.torch",
    "pyarrow.parquet",
    "prefect_rlhf.engines.rank.rank",
)


_UNUSED = ("wandb", "torch.utils.tensorboard", "scipy.signal")
"""Megatron and vLLM import these if they are there, which takes a second, and ranks use none of them."""


def modules_of(engines: Iterable[EngineKind], device: Backend = "cpu") -> tuple[str, ...]:
    """Return the modules that ranks with these engines import on a kind of device.

    >>> [name for name in modules_of({"python"}) if name.startswith(("megatron", "vllm"))]
    []
    """
    wanted = set(engines)
    in_order = [engine for engine in reversed([*TRAITS]) if engine in wanted]  # Megatron before vLLM
    traits = [TRAITS[engine] for engine in in_order]
    own = ((*each.preloads, *(each.cpu_modules if device == "cpu" else each.cuda_modules)) for each in traits)
    return (*_OF_ALL, *chain.from_iterable(own))


def preload(modules: Iterable[str]) -> None:
    """Import the modules that can be imported; a rank that needs another module reports the error itself."""
    with never_collected(), _absent(_UNUSED):
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001  a foreign module may raise anything while it is imported
                logging.getLogger(__name__).debug("not preloaded: %s (%s)", module, error)


@contextmanager
def never_collected() -> Iterator[None]:
    """Keep Python's garbage collector away from what the body makes, while it is made and ever after.

    To scan millions of imported objects takes a sixth of the processor time of the imports, and again half a second
    at each full collection in a rank, where it also copies the memory pages that forked ranks share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def _absent(modules: Iterable[str]) -> Iterator[None]:
    """Let modules seem not to be installed, except those that are imported already."""
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: an import raises ModuleNotFoundError
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
