"""Kernels of an engine on CPU in place of vLLM's defaults, which are made for a compiler that is off there."""

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  as everybody calls it
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from prefect_rlhf.engines.cpu_products import has_bfloat16, is_in_float32, product
from prefect_rlhf.engines.vllm.sampler import RowSampler

NORM_MULTIPLE = 8  # widths that vLLM's kernel for norms takes: it computes eight numbers at once


class CpuKernels:
    """Packed linear layers, fused norms and a lean sampler in the model of an engine.

    On a processor whose oneDNN has no bfloat16, vLLM would leave its layers to torch's own loops, which are the slowest
    of all. There a layer computes in float32 from the weights themselves, and nothing is packed. Norms stay vLLM's own
    where its kernel cuts digits.

    A packed layer computes from a copy of its weights in the layout of the matrix unit, hidden in oneDNN. vLLM empties
    the readable weights after packing; here they stay, and `pack` makes the copies anew after they were written.
    Measured (135M parameters, bf16, a single thread, 32 rows of 24 + 24 tokens): 1.7 s and 0.11 s for `pack`; unpacked
    and with vLLM's own norms and sampler 2.7 s.
    """

    def __init__(self, runner: Any) -> None:
        model: nn.Module = runner.get_model()
        self._layers: list[Any] = [m for m in model.modules() if isinstance(m, LinearBase | ParallelLMHead)]
        self._packed = False
        self._stale = True  # the weights were written since they were packed
        for norm in (m for m in model.modules() if isinstance(m, RMSNorm) and m.hidden_size % NORM_MULTIPLE == 0):
            if not (norm.weight.dtype == torch.bfloat16 and cuts_digits()):
                norm._forward_method = partial(_rms_norm, norm)
        runner.sampler = RowSampler(runner.sampler.logprobs_mode)

    def weights_written(self) -> None:
        """Declare that the packed weights are outdated."""
        self._stale = True

    def pack(self) -> None:
        """Copy the readable weights of every linear layer, lm_head included, into its packed form, unless done."""
        if not self._stale:
            return
        for layer in self._layers:
            if is_packed(layer):
                _pack(layer)
            else:
                layer.cpu_linear = _linear
        self._packed, self._stale = True, False

    def drop(self) -> None:
        """Free the packed copies; the layers compute from the readable weights until the next `pack`."""
        for layer in self._layers:
            layer.cpu_linear = _linear
        self._packed, self._stale = False, True

    def num_bytes(self) -> int:
        """Bytes of the packed copies, which no tensor shows: as many as the weights they copy."""
        return sum(layer.weight.nbytes for layer in self._layers if is_packed(layer)) if self._packed else 0


def is_packed(layer: Any) -> bool:
    """Whether oneDNN can pack the layer's weight on this processor."""
    return layer.weight.dtype != torch.bfloat16 or has_bfloat16()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., I] by the readable weight [F, I], and add the bias."""
    if not is_in_float32(x, x.shape[:-1].numel()):
        return F.linear(x, weight, bias)
    made = product(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)
    return made if bias is None else made + bias


def _pack(layer: Any) -> None:
    """Let a layer compute from a packed copy of its weight, and from the bias that is written."""
    bias: nn.Parameter | None = getattr(layer, "bias", None)
    own = None if bias is None else bias.data
    dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    # On CPUs with AMX, small matrices of bfloat16 have a kernel that reads its bias in float32. For it vLLM puts a copy
    # in the place of the bias, which no later write to the bias would reach.
    if bias is not None and own is not None and bias.data_ptr() != own.data_ptr():
        layer.cpu_linear = partial(_with_bias_in, bias.dtype, layer.cpu_linear)
        bias.data = own


def _with_bias_in(dtype: torch.dtype, product: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Call a kernel that reads its bias in another format. The conversion takes microseconds."""
    made: Tensor = product(x, weight, None if bias is None else bias.to(dtype))
    return made


@lru_cache(maxsize=1)
def cuts_digits() -> bool:
    """Whether vLLM's kernels cut the digits that bfloat16 lacks, as its build for AVX2 does, instead of rounding them.

    Then every norm would make its result smaller. SmolLM2-135M's log-probabilities were off by 0.14 nats a token, and
    by 0.04 with vLLM's own norms, as in transformers (2026-11-28). Other kernels cut too, without such an effect.
    """
    ones = torch.ones(1, NORM_MULTIPLE, dtype=torch.bfloat16)
    made = torch.empty_like(ones)
    torch.ops._C.rms_norm(made, ones, ones[0], 0.002)  # 1 / sqrt(1.002) = 0.999, between 0.996 and 1
    return bool((made < 1).any())


def _rms_norm(norm: RMSNorm, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    """Call vLLM's own kernel for CPU, in place of eight small operations; like them it may overwrite x and residual.

    It assumes consecutive rows; queries and keys, which have their own norms, are views.
    """
    if residual is None:
        rows = x.contiguous()
        out = torch.empty_like(rows)
        torch.ops._C.rms_norm(out, rows, norm.weight, norm.variance_epsilon)
        return out
    torch.ops._C.fused_add_rms_norm(x, residual, norm.weight, norm.variance_epsilon)
    return x, residual
