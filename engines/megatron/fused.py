"""Pieces of a layer in torch's own fused kernels, as they run on CUDA.

Shapes: S tokens of a row, B rows, H hidden, F feed-forward, G key-value heads, Q query heads for each of them, X = Q +
2 (queries, key, value), D head dimension.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled, enable_cudnn_sdp

from prefect_rlhf.placement.models.engine_constants import window_block


def rms_norm(x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis; in the weight's format if that is wider."""
    return F.rms_norm(x.to(weight_H.dtype), weight_H.shape, weight_H, eps).to(x.dtype)


def gated_silu(both: Tensor) -> Tensor:
    """Return silu(gate) * up of [..., 2F] with gate first."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def gated_gelu(both: Tensor) -> Tensor:
    """Return gelu(gate) * up of [..., 2F] with gate first; gelu in its tanh approximation."""
    gate, up = both.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def causal_attention(qkv_SBGXD: Tensor, cos_SD: Tensor, sin_SD: Tensor, window: int | None = None) -> Tensor:
    """Rotate queries and keys by tables [S, D / 2], and attend causally; return [S, B, G, Q, D].

    With a window, a token attends only to that number of tokens.
    """
    length, num_rows, groups, width, dim = qkv_SBGXD.shape
    first, second = qkv_SBGXD[..., :-1, :].chunk(2, dim=-1)
    cos, sin = (table[:, None, None, None] for table in (cos_SD, sin_SD))
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads = (rotated[..., :-1, :], rotated[..., -1:, :], qkv_SBGXD[..., -1:, :])
    query, key, value = (x.flatten(2, 3).permute(1, 2, 0, 3) for x in heads)
    mixed = attention(query, key, value, window)
    return mixed.permute(2, 0, 1, 3).reshape(length, num_rows, groups, width - 2, dim)


def attention(query_BHSD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, window: int | None) -> Tensor:
    """Attend causally; a token attends to `window` tokens including itself, or to all before it.

    Rows are padded at their end, so no mask is needed: tokens never attend to padding, and outputs at padding are not
    used.
    """
    choose_kernel(query_BHSD)
    length = query_BHSD.shape[-2]
    if window is None or length <= window:
        return F.scaled_dot_product_attention(query_BHSD, key_BGSD, value_BGSD, is_causal=True, enable_gqa=True)
    if query_BHSD.is_cuda:
        return window_attention(query_BHSD, key_BGSD, value_BGSD, window)
    seen_SS = torch.ones(length, length, dtype=torch.bool, device=query_BHSD.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(query_BHSD, key_BGSD, value_BGSD, attn_mask=seen_SS, enable_gqa=True)


def choose_kernel(query: Tensor) -> None:
    """On CUDA, restrict torch from now on to its own attention kernels, flash attention first.

    On Hopper torch prefers cuDNN's kernel, which builds a plan for each new shape, and our micro-batches and decoding
    steps rarely have the shape of the last. placement/models/attention_kernel.py says when each kernel is used.
    """
    if query.is_cuda and cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        enable_cudnn_sdp(False)


def window_attention(query_BHSD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, window: int) -> Tensor:
    """Attend causally to `window` tokens, with one block of queries at a time and the keys that it needs.

    A mask over all tokens would exclude torch's flash kernel, and its memory-efficient kernel does not support shared
    keys; the remaining kernel keeps the scores of all token pairs. Here query heads that share keys are moved to the
    token axis, so the memory-efficient kernel can run. Masks are per block, so even if another kernel runs, its scores
    grow linearly with the number of tokens. Not yet run on a GPU.
    """
    num_rows, groups, length, dim = key_BGSD.shape
    query_BGSQD = query_BHSD.view(num_rows, groups, -1, length, dim).transpose(2, 3)
    heads = query_BGSQD.shape[3]
    size, reach = window_block(window)
    mask = _window_mask(window, heads, query_BHSD.dtype, query_BHSD.device)
    made = []
    for number, block_BGCQD in enumerate(torch.split(query_BGSQD, size, 2)):
        begin, tokens = number * size, block_BGCQD.shape[2]
        before = min(begin, reach)
        keys, values = (x[:, :, begin - before : begin + tokens] for x in (key_BGSD, value_BGSD))
        seen = mask[: tokens * heads, reach - before : reach + tokens]
        mixed = F.scaled_dot_product_attention(block_BGCQD.flatten(2, 3), keys, values, attn_mask=seen)
        made.append(mixed.view(num_rows, groups, tokens, heads, dim).permute(2, 0, 1, 3, 4))
    return torch.cat(made).flatten(2, 3).permute(1, 2, 0, 3)


@lru_cache(maxsize=4)  # all layers with a window share a mask, which autograd keeps
def _window_mask(window: int, heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the mask of a block's queries, with `heads` rows for each token, over the keys before and in it.

    It is 0 for a key that a query sees and minus infinity elsewhere.
    """
    size, reach = window_block(window)
    query, key = (torch.arange(count, device=device) for count in (size, reach + size))
    distance = query[:, None] + reach - key
    hidden = (distance < 0) | (distance >= window)
    return torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf).repeat_interleave(heads, 0)
