"""vLLM's linear layers as on CPUs with AMX and as on CPUs whose oneDNN has no bfloat16, on any CPU.

With AMX, vLLM itself chooses the kernel, packs the weight and converts the bias. AMX is claimed for that choice alone,
so that attention keeps a kernel that this CPU has. The kernels also run on CPUs without AMX, if they have bfloat16; on
others a product in float32 takes their place.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from vllm.model_executor.layers import utils as vllm_layers

from prefect_rlhf.engines import cpu_products
from prefect_rlhf.engines.vllm.cpu import kernels


@contextmanager
def amx() -> Iterator[list[tuple[int, int]]]:
    """Let vLLM pack so; yields the sizes [N, K] of the matrices it packed."""
    chooses, packed = vllm_layers.check_cpu_sgl_kernel, list[tuple[int, int]]()

    def choose(n: int, k: int, dtype: torch.dtype) -> bool:
        with mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):
            chosen = chooses(n, k, dtype)
        packed.extend([(n, k)] * chosen)
        return chosen

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(kernels, "has_bfloat16", lambda: True))  # as every CPU with AMX
        stack.enter_context(mock.patch.object(vllm_layers, "check_cpu_sgl_kernel", choose))
        if not hasattr(torch.ops._C, "weight_packed_linear"):
            for name, function in (("convert_weight_packed", _packed), ("weight_packed_linear", _product)):
                stack.enter_context(mock.patch.object(torch.ops._C, name, function, create=True))
        yield packed


@contextmanager
def no_bfloat16() -> Iterator[list[tuple[int, int]]]:
    """Let an engine see a CPU whose oneDNN has no bfloat16; yields no sizes."""
    with (
        mock.patch.object(kernels, "has_bfloat16", lambda: False),
        mock.patch.object(cpu_products, "fewest_tokens", lambda: 4),
    ):
        yield []


def bytes_with_packed(engine: Any) -> int:
    """Return what the engine would hold if this CPU packed all of its layers, as the certificate assumes."""
    held: int = engine.device_bytes()
    return held + sum(layer.weight.nbytes for layer in engine._cpu._layers if not kernels.is_packed(layer))


def _packed(weight_NK: Tensor) -> Tensor:
    return weight_NK.t().contiguous()


def _product(out_MN: Tensor, x_MK: Tensor, packed_KN: Tensor, bias_N: Tensor | None, is_packed: bool) -> None:
    assert is_packed and (bias_N is None or bias_N.dtype == torch.float32), "as the kernel demands"
    out_MN.copy_(F.linear(x_MK.float(), packed_KN.t().float(), bias_N))
