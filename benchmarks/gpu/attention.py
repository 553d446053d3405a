"""Which kernels does attention take, and does a sliding window need a matrix of S x S?"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.step import NO, YES, Expected, Found, Machine, Step

HEADS, GROUPS = 32, 8


def attention_kernels(machine: Machine) -> Found:
    """Forward and backward: causal with shared keys, with a window, and a decoding step with its mask."""
    from prefect_rlhf.engines.megatron.fused import attention

    found = machine.found
    for dim in (64, 128):
        for length in (2048, 16384):
            query, key, value = _heads(length, dim)
            _measured(machine, f"causal_d{dim}_s{length}", lambda q, k, v: attention(q, k, v, None), query, key, value)
    query, key, value = _heads(8192, 128)
    _measured(machine, "window_512_s8192", lambda q, k, v: attention(q, k, v, 512), query, key, value)
    scores_gib = HEADS * 8192**2 * 2 / 2**30
    found["window_makes_scores"] = found["window_512_s8192_peak_gib"] > scores_gib
    query = torch.randn(64, GROUPS, HEADS // GROUPS, 128, dtype=torch.bfloat16, device="cuda")
    keys = torch.randn(64, GROUPS, 4096, 128, dtype=torch.bfloat16, device="cuda")
    mask = torch.zeros(64, 1, 1, 4096, dtype=torch.bfloat16, device="cuda")
    decode = torch.nn.functional.scaled_dot_product_attention
    _measured(machine, "decode_64x4096", lambda q, k, v: decode(q, k, v, attn_mask=mask), query, keys, keys)
    return found


def _heads(length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    query = torch.randn(1, HEADS, length, dim, **options, requires_grad=True)
    key, value = (torch.randn(1, GROUPS, length, dim, **options, requires_grad=True) for _ in range(2))
    return query, key, value


def _measured(machine: Machine, name: str, function: Any, *inputs: torch.Tensor) -> None:
    """Find the kernels' names, milliseconds of forward and backward, and the peak beyond the inputs in GiB."""

    def once() -> None:
        made = function(*inputs)
        if made.requires_grad:
            made.sum().backward()

    once()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(5):
        once()
    ended.record()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        once()
        torch.cuda.synchronize()
    kernels = sorted({event.key[:80] for event in profile.key_averages() if event.self_device_time_total > 0})
    is_fused = any(word in kernel.lower() for kernel in kernels for word in ("flash", "cudnn", "fmha", "sdpa"))
    found = machine.found
    found[f"{name}_ms"] = began.elapsed_time(ended) / 5
    found[f"{name}_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    found[f"{name}_is_fused"] = is_fused
    found[f"{name}_kernels"] = kernels


STEPS_OF_ATTENTION = (
    Step(
        "attention_kernels",
        2,
        240,
        attention_kernels,
        {
            **{f"causal_d{dim}_s{length}_is_fused": YES for dim in (64, 128) for length in (2048, 16384)},
            "window_makes_scores": NO,
            "causal_d128_s2048_ms": Expected(0, 2.0),
        },
        needs=frozenset({"hardware"}),
        findings="C5, N9",
    ),
)
