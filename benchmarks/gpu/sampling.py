"""Our choice of a token against vLLM's: log-probabilities under top_p, and milliseconds."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.step import Expected, Found, Machine, Step
from prefect_rlhf.engines.sampling.sampler import choose


def choice_of_tokens(machine: Machine) -> Found:
    """Random logits: the bias of log-probabilities over the filtered vocabulary, and the time of our choice."""
    rows, vocab = machine.pick((512, 151936), (64, 4096))
    found = machine.found
    torch.manual_seed(0)
    with machine.gpu() as pretend:
        logits = torch.randn(rows, vocab, device="cuda") * 3
        uniforms = torch.rand(rows, dtype=torch.float64, device="cuda")
        for top_p in (0.95, 0.9, 0.8):
            ours = choose(logits, uniforms, 1.0, top_p)
            whole = logits.log_softmax(-1).gather(1, ours.tokens_B[:, None])[:, 0]
            found["largest_difference"] = float((ours.logprobs_B - whole).abs().max())
            assert ours.kept_mass_B is not None
            filtered = whole - ours.kept_mass_B.log()  # as an engine that normalizes after its filters returns it
            found[f"bias_of_filtered_{top_p}"] = float((whole - filtered).exp().mean())
        if pretend is None:
            for name, settings in (("plain", (1.0,)), ("top_p", (1.0, 0.9)), ("top_k", (1.0, 1.0, 50))):
                found[f"{name}_ms"] = _milliseconds(lambda settings=settings: choose(logits, uniforms, *settings))
    return found


def _milliseconds(call: Any) -> float:
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    return 100 * (time.perf_counter() - began)


STEPS_OF_SAMPLING = (
    Step(
        "choice_of_tokens",
        6,
        120,
        choice_of_tokens,
        {
            "largest_difference": Expected(0, 1e-4),
            **{f"bias_of_filtered_{p}": Expected(p - 0.01, p + 0.05, "the kept mass") for p in (0.95, 0.9, 0.8)},
            "plain_ms": Expected(0, 0.6),
        },
        findings="B2, N3",
    ),
)
