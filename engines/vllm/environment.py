"""The environment variables that vLLM must find when it is imported."""

import os
import sys
from collections.abc import Mapping

import torch


def settle() -> None:
    """Set the variables that an engine in a rank process depends on; leave matters of taste to the user."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the rank process itself
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # its models are folders of this machine
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if torch.cuda.is_available():
        os.environ |= {
            "VLLM_USE_V2_MODEL_RUNNER": "1",  # the runner of our sampler; vLLM would fall back to another in silence
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",  # it has a single buffer in a process, for the first engine's ranks
        }
    else:
        _settle_cpu()


def survive_scan() -> None:
    """Let vLLM's scan skip objects of other libraries that refuse to be inspected.

    Building an engine on a CPU, vLLM asks every object of every module for a `__dict__`. A proxy of Flask's then raises
    a RuntimeError, and llvmlite's library, which has a function by every name, returns a function.
    """
    from vllm.triton_utils import dispatcher

    dispatcher.hasattr = _has  # its own name is found before the built-in function


def inspect_here(architecture: str) -> None:
    """Let vLLM look at a model's class in this process, which builds that class's engine next.

    Otherwise vLLM's first build on a machine starts a Python that imports all of vLLM again only to look at it.
    """
    from vllm.model_executor.models import ModelRegistry

    known = ModelRegistry.models.get(architecture)  # also a plugin's class, if a plugin replaced vLLM's
    if known is not None:
        ModelRegistry.register_model(architecture, known.load_model_cls())


def _has(value: object, name: str) -> bool:
    try:
        found = getattr(value, name)
    except Exception:  # noqa: BLE001  whatever a proxy raises, it holds no kernel
        return False
    return name != "__dict__" or isinstance(found, Mapping)


def _settle_cpu() -> None:
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the cache size that we compute
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all ranks of a machine are bound to the same cores
        "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles a kernel for seconds
    }
    if "torch._dynamo.config" in sys.modules:  # it has read its environment variable already
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]
