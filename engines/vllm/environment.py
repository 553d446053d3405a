"""The environment variables that vLLM must find when it is imported."""

from __future__ import annotations

import os
import sys

import torch


def settle() -> None:
    """Set what an engine in a rank process depends on; leave to the user what is a matter of taste."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the rank process itself
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # models are folders
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        _settle_cpu()


def survive_scan() -> None:
    """Give llvmlite's library, which has a function by every name asked for, a `__dict__` that is one.

    Building an engine on a CPU, vLLM looks into the `__dict__` of whatever any module of the process holds, and numba
    (the search of plans) may have loaded llvmlite.
    """
    if "llvmlite.binding.ffi" in sys.modules:
        sys.modules["llvmlite.binding.ffi"].lib._fntab.setdefault("__dict__", {})


def _settle_cpu() -> None:
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the cache size that we compute
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all ranks of a machine are bound to the same cores
        "TORCHDYNAMO_DISABLE": "1",  # else the first request compiles a kernel for seconds
    }
    if "torch._dynamo.config" in sys.modules:  # it has read its environment variable already
        sys.modules["torch._dynamo.config"].disable = True  # type: ignore[attr-defined]
