"""Imports that ranks need for their plan's engines, made once in the process that forks the ranks.

Importing must start no thread and run no tensor operation: neither survives a fork.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

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
_OF_ENGINE: Mapping[EngineKind, tuple[str, ...]] = MappingProxyType(
    {
        "megatron": (
            "megatron.core.models.gpt.gpt_model",
            "megatron.core.optimizer",
            "megatron.core.distributed",
            "megatron.core.pipeline_parallel.schedules",
        ),
        "vllm": (
            "prefect_rlhf.engines.vllm",  # sets the environment that vllm reads at its import
            "vllm",
            "vllm.v1.engine.core",
            "vllm.v1.worker.cpu_worker",
            "vllm.v1.worker.cpu_model_runner",
            "vllm.model_executor.models.llama",
            "vllm.model_executor.models.qwen2",
            "vllm.model_executor.models.qwen3",
            "vllm.model_executor.models.gemma3",
        ),
        "python": (),
    }
)
ENGINES: tuple[EngineKind, ...] = tuple(_OF_ENGINE)


def modules_of(engines: Iterable[EngineKind]) -> tuple[str, ...]:
    """Return the modules that ranks with these engines import.

    >>> [name for name in modules_of({"python"}) if name.startswith(("megatron", "vllm"))]
    []
    """
    return (*_OF_ALL, *(module for engine in ENGINES if engine in set(engines) for module in _OF_ENGINE[engine]))


def preload(modules: Iterable[str]) -> None:
    """Import the modules that can be imported; a rank that needs another module reports the error itself."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  a foreign module may raise anything while it is imported
            logging.getLogger(__name__).debug("not preloaded: %s (%s)", module, error)
