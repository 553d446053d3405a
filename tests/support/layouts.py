"""The layout of an engine on some ranks, and the least that a move between two layouts brings."""

from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import Layout, engine_layout
from prefect_rlhf.placement.layout.regions import intersection, num_elements
from prefect_rlhf.placement.models.model import ModelSpec


def megatron_layout(model: ModelSpec, strategy: Strategy, ranks: tuple[int, ...]) -> Layout:
    return engine_layout(model, "megatron", strategy, ranks)


def vllm_layout(model: ModelSpec, strategy: Strategy, ranks: tuple[int, ...]) -> Layout:
    return engine_layout(model, "vllm", strategy, ranks)


def num_lacking(source: Layout, target: Layout) -> int:
    """Count the elements that ranks need under `target` and do not hold under `source`: no plan moves fewer.

    >>> shapes, whole, half = {"w": (4, 8)}, ((0, 4), (0, 8)), ((0, 4), (0, 4))
    >>> num_lacking(Layout(shapes, {"w": {0: half, 1: whole}}), Layout(shapes, {"w": {0: whole, 2: half}}))
    32
    """
    lacking = 0
    for name, by_rank in target.regions.items():
        for rank, region in by_rank.items():
            held = source.regions.get(name, {}).get(rank)
            common = None if held is None else intersection(region, held)
            lacking += num_elements(region) - (0 if common is None else num_elements(common))
    return lacking
