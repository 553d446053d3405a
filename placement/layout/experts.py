"""Which degrees of expert parallelism a model may have in an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prefect_rlhf.placement.model import ModelSpec
from prefect_rlhf.placement.plan import EngineKind
from prefect_rlhf.placement.strategy import Strategy


def wrong_ep(model: ModelSpec, engine: EngineKind, strategy: Strategy) -> str:
    """Return what ep should be instead, in words; empty for one that shares the model's experts out.

    With vLLM all replicas share experts or none do (its `enable_expert_parallel`, which has whole experts on dp * tp
    ranks: as many bytes as parts of dp-th experts, as counted here).
    """
    experts, (dp, tp, ep) = model.shape.experts, (strategy.dp, strategy.tp, strategy.ep)
    if ep <= 1:
        return ""
    if experts is None:
        return f"1: {model.role} has no experts"
    if engine == "vllm" and (ep != dp or experts.count % (dp * tp)):
        shared = f"1 or {dp}, its dp" if experts.count % (dp * tp) == 0 else "1"
        return f"{shared}: vllm shares the {experts.count} experts of {model.role} over all {dp * tp} devices or none"
    if dp % ep:
        return f"a divisor of dp {dp}"
    return f"a divisor of the {experts.count} experts of {model.role}" if experts.count % ep else ""


def with_expert_degrees(strategy: Strategy, model: ModelSpec, engine: EngineKind) -> Iterator[Strategy]:
    """Yield the strategy with each ep that the model may have in an engine, 1 first; of a dense model itself."""
    degrees = range(1, strategy.dp + 1) if model.shape.experts else (1,)
    spread = (replace(strategy, ep=ep) for ep in degrees if strategy.dp % ep == 0)
    return (one for one in spread if not wrong_ep(model, engine, one))
