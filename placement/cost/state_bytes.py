"""Bytes of training state that each device's rank copies to host memory for a checkpoint, and writes from there."""

from collections import Counter
from functools import cache

from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.engine_constants import ADAM_BYTES, MAIN_WEIGHT_BYTES
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, device_coordinates, trained_instance


def copied_bytes(graph: DataflowGraph, plan: ExecutionPlan) -> Counter[Device]:
    """Add up, device by device, the bytes that a checkpoint of all trained roles copies: the most in host memory.

    Weights that all tensor-parallel devices hold, norms for example, count on each, although a single device writes
    them.
    """
    copied: Counter[Device] = Counter()
    for model in graph.models:
        instance = trained_instance(graph, plan, model.role)
        if instance is not None:
            copied.update(instance_copied_bytes(instance, ModelSizes.of(model)))
    return copied


def instance_copied_bytes(instance: ModelInstance, sizes: ModelSizes) -> dict[Device, int]:
    """Return, by device, the bytes that a trained instance's ranks copy: main weights and moments, over replicas."""
    strategy, per_element = instance.strategy, MAIN_WEIGHT_BYTES + ADAM_BYTES

    @cache
    def elements(stage: int) -> int:
        experts = sizes.stage_experts(strategy, stage)
        others = sizes.stage_parameters(strategy, stage) - experts
        return -(-others // strategy.dp) + -(-experts * strategy.ep // strategy.dp)

    return {device: elements(at.pp) * per_element for device, at in device_coordinates(instance)}
