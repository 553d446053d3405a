"""Expert parallelism: the degrees that a model may have in an engine, and the experts that each device then holds."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from prefect_rlhf.placement.devices.strategy import Coordinate, Strategy
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.plan import EngineKind


class Part(NamedTuple):
    """A part, numbered from 0, of `of` equal parts."""

    number: int
    of: int


def experts_held(engine: EngineKind, strategy: Strategy, at: Coordinate) -> tuple[Part, Part]:
    """Return which part of a layer's experts a coordinate has, and which part of each expert's columns.

    >>> experts_held("megatron", Strategy(dp=4, tp=2, ep=2), Coordinate(3, 1, 0))
    (Part(number=1, of=2), Part(number=1, of=2))
    >>> experts_held("vllm", Strategy(dp=4, tp=2, ep=4), Coordinate(3, 1, 0))
    (Part(number=7, of=8), Part(number=0, of=1))
    """
    if TRAITS[engine].experts_over_tp and strategy.ep > 1:
        return Part(at.dp * strategy.tp + at.tp, strategy.dp * strategy.tp), Part(0, 1)
    return Part(at.dp % strategy.ep, strategy.ep), Part(at.tp, strategy.tp)


def wrong_ep(model: ModelSpec, engine: EngineKind, strategy: Strategy) -> str:
    """Return in words what ep may be instead; empty if it divides the model's experts.

    With vLLM, all devices together hold every expert once (its `enable_expert_parallel`), or each replica has all
    experts, split by tp.
    """
    experts, (dp, tp, ep) = model.shape.experts, (strategy.dp, strategy.tp, strategy.ep)
    if ep <= 1:
        return ""
    if experts is None:
        return f"1: {model.role} has no experts"
    if TRAITS[engine].experts_over_tp and (ep != dp or experts.count % (dp * tp)):
        shared = f"1 or {dp}, its dp" if experts.count % (dp * tp) == 0 else "1"
        over = f"the {experts.count} experts of {model.role} over all {dp * tp} devices"
        return f"{shared}: {engine} divides {over} or not at all"
    if dp % ep:
        return f"a divisor of dp {dp}"
    return f"a divisor of the {experts.count} experts of {model.role}" if experts.count % ep else ""


def with_expert_degrees(strategy: Strategy, model: ModelSpec, engine: EngineKind) -> Iterator[Strategy]:
    """Yield the strategy with each ep that the model may have in an engine, 1 first; unchanged for a dense model."""
    degrees = range(1, strategy.dp + 1) if model.shape.experts else (1,)
    spread = (replace(strategy, ep=ep) for ep in degrees if strategy.dp % ep == 0)
    return (one for one in spread if not wrong_ep(model, engine, one))
