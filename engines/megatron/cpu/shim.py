"""Replacements that make Megatron-core run without CUDA; they are not installed if CUDA is available.

Megatron-core writes `device="cuda"` and `torch.cuda.current_device()` as literals, and compares tensor type names
with `torch.cuda.FloatTensor`. Each replacement below answers such code.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads, optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers, random

from prefect_rlhf.engines.megatron.cpu import products

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class _TorchOnCpu:
    """A stand-in for the module `torch` inside Megatron modules that say `device="cuda"`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*size: Any, device: object = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*size, **options)

    @staticmethod
    def tensor(data: Any, device: object = None, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **options)


class _WeightGradients:
    """A stand-in for Apex's CUDA module, which Megatron's linear layers call to fill gradient buffers."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs_NH: torch.Tensor, above_NF: torch.Tensor, main_grad_FH: torch.Tensor) -> None:
        """Add above.T @ inputs to the buffer."""
        products.add_weight_product(main_grad_FH, above_NF, inputs_NH)


def install() -> None:
    """Replace the functions that need CUDA. Idempotent; a no-op if CUDA is available."""
    if torch.cuda.is_available() or isinstance(schedules.torch, _TorchOnCpu):
        return
    setattr(torch.cuda, "current_device", lambda: "cpu")  # noqa: B010  (mypy: a function of another type)
    setattr(torch.cuda, "synchronize", lambda *_: None)  # noqa: B010
    setattr(torch.Tensor, "cuda", lambda tensor, *_, **__: tensor)  # noqa: B010
    for module in (schedules, optimizer, clip_grads, utils):
        module.torch = _TorchOnCpu()
    layers.fused_weight_gradient_mlp_cuda, layers._grad_accum_fusion_available = _WeightGradients, True
    products.install()
    # Let the allocator reuse freed blocks of any size: otherwise each activation of a megabyte or more is mapped anew
    # and faulted in page by page, which takes longer than its arithmetic. Offloading gives memory back by malloc_trim.
    with contextlib.suppress(OSError, AttributeError):  # a C library without these settings
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)
    random.initialize_rng_tracker(inference_rng_tracker=True)  # dropout is 0, so its fork() may do nothing


@contextmanager
def cuda_type_names() -> Iterator[None]:
    """Make CPU tensors report the type `torch.cuda.FloatTensor`, as the optimizers expect."""
    if torch.cuda.is_available():
        yield
        return
    original = torch.Tensor.type

    def type_name(tensor: torch.Tensor, *dtype: Any, **options: Any) -> Any:
        if dtype or options:
            return original(tensor, *dtype, **options)
        return original(tensor).replace("torch.", "torch.cuda.")

    setattr(torch.Tensor, "type", type_name)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.Tensor, "type", original)  # noqa: B010
