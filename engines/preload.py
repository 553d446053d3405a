"""Imports that every rank needs, made once in the process that ranks are forked from.

Importing must start no thread and run no tensor operation: neither survives a fork.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable

MODULES = (
    "torch",
    "torch.distributed",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "safetensors.torch",
    "pyarrow.parquet",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel.schedules",
    "prefect_rlhf.engines.vllm",  # settles the environment that vllm reads when it is imported
    "vllm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "prefect_rlhf.engines.rank",
)


def preload(modules: Iterable[str]) -> None:
    """Import what can be imported; a rank that needs what cannot says so itself."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  a foreign module may raise anything while it is imported
            logging.getLogger(__name__).debug("not preloaded: %s (%s)", module, error)
