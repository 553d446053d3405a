"""Imports that ranks need for their plan's engines, done once in the process that forks the ranks.

Importing must start no thread and run no tensor operation, because neither survives a fork.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from itertools import chain

from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.plan import EngineKind

_OF_ALL = (
    "torch",
    "torch.distributed",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "pyarrow.parquet",
    "prefect_rlhf.engines.rank.rank",
)


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
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  a foreign module may raise anything while it is imported
            logging.getLogger(__name__).debug("not preloaded: %s (%s)", module, error)
