"""A plan's speed in units that people compare: tokens per second, utilisation (MFU), samples, and money.

Utilisation is a call's model FLOPs over its seconds, its devices and their peak (`model_flops`): Chowdhery et al. 2022
(PaLM, arXiv:2204.02311), appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass

from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.schedule.schedule import Schedule

ATTENDED = 0.5  # of all pairs of tokens: attention is causal
TRAINING_PASSES = 3  # a backward pass has twice the products of a forward pass
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class CallSpeed:
    """A call in an iteration of a long run: its seconds, and its share of the iteration."""

    call: str
    seconds: float
    share: float
    tokens_per_second: float | None = None
    """Of prompts and responses, in every epoch; None for a computation."""
    utilisation: float | None = None
    """The MFU, from 0 to 1; None for a computation, and for devices without a peak by a datasheet (CPU)."""


@dataclass(frozen=True, slots=True)
class IterationWork:
    """An iteration's work: the rows that train_steps read, each row once, and their tokens.

    `tokens` counts prompts and responses. Without a call that generates, all tokens count as responses. If no call
    trains, the rows of all model calls count. `dollars_per_hour` is the price of all devices, or None.
    """

    samples: int
    tokens: float
    response_tokens: float
    dollars_per_hour: float | None = None

    @classmethod
    def of(cls, graph: DataflowGraph, workload: Workload, dollars_per_hour: float | None = None) -> IterationWork:
        """Return the work of a graph's iteration, without evaluation."""
        calls = [call for call in graph if call.every is None and call.kind != "compute"]
        trained = [call for call in calls if call.kind == "train_step"]
        parts = {part.rows: part for call in trained or calls for part in call.by_row_set}
        rows = [(part.row_count.expected, workload.of(part.rows)) for part in parts.values()]
        return cls(
            sum(count for count, _ in rows),
            sum(count * lengths.mean_length for count, lengths in rows),
            sum(count * lengths.responses.mean for count, lengths in rows),
            dollars_per_hour,
        )

    def dollars_per_million(self, seconds: float) -> float | None:
        """Return the dollars per million response tokens if an iteration takes `seconds`; None without a price."""
        if self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour * seconds / 3600 / self.response_tokens * MILLION


def call_speeds(
    graph: DataflowGraph, plan: ExecutionPlan, schedule: Schedule, workload: Workload, sources: CostSources
) -> dict[str, CallSpeed]:
    """Return each call's speed in an iteration, by name; evaluation, which not every step has, is left out."""
    speeds = {}
    for call in graph:
        if call.every is not None or not schedule.of_call(call.name):
            continue
        seconds = schedule.call_seconds(call.name)
        share = seconds / schedule.seconds_per_step
        if call.kind == "compute" or call.role is None:
            speeds[call.name] = CallSpeed(call.name, seconds, share)
            continue
        work, sizes = CallWork.expected(call, workload), ModelSizes.of(graph.model(call.role))
        tokens = sum(part.rows * part.workload.mean_length for part in work.by_row_set) * work.epochs
        peak = peak_flops(sources, plan[call.name].mesh, sizes)
        used = model_flops(work, sizes) / seconds / peak if peak else None
        speeds[call.name] = CallSpeed(call.name, seconds, share, tokens / seconds, used)
    return speeds


def iteration_utilisation(
    graph: DataflowGraph, seconds: float, workload: Workload, sources: CostSources, mesh: DeviceMesh
) -> float | None:
    """Return the MFU of all devices of `mesh` over an iteration of `seconds`; None for devices without a peak (CPU).

    It is the model FLOPs of all calls except evaluation over seconds and the peak of all devices.
    """
    used = 0.0
    for call in graph:
        if call.kind == "compute" or call.role is None or call.every is not None:
            continue
        work, sizes = CallWork.expected(call, workload), ModelSizes.of(graph.model(call.role))
        peak = peak_flops(sources, mesh, sizes)
        if peak is None:
            return None
        used += model_flops(work, sizes) / peak
    return used / seconds


def model_flops(work: CallWork, sizes: ModelSizes) -> float:
    """Return how many floating-point operations a call's results need, whatever else an engine computes.

    Forward: 2 per active parameter and token, and 4 x width x context / 2 per token and layer for causal attention
    (Narayanan et al. 2021, appendix). Active parameters are the layers' matrices (of the experts only those that a
    token uses) and, for response tokens, the head. A train_step has three times as many operations in each epoch; with
    an adapter, two times for the base's matrices, which have no gradients. Recomputed layers do not count.
    """
    flops, trains = 0.0, work.kind == "train_step"
    of_base = TRAINING_PASSES - (1 if sizes.adapter else 0) if trains else 1
    passes = TRAINING_PASSES if trains else 1
    for part in work.by_row_set:
        lengths, has_head = part.workload, part.vocabulary_passes > 0 and "lm" in sizes.head
        length = lengths.mean_length
        layer: float = of_base * 2 * (sizes.layer_products + sizes.router)
        layer += passes * (2 * sizes.layer_adapter() + 4 * ATTENDED * sizes.queries * length)
        head = of_base * 2 * sizes.table * lengths.responses.mean if has_head else 0.0
        flops += part.rows * (length * sizes.num_layers * layer + head)
    return flops * (work.epochs if trains else 1)


def peak_flops(sources: CostSources, mesh: DeviceMesh, sizes: ModelSizes) -> float | None:
    """Return the peak FLOP/s of a mesh's devices in the model's format; None if a device has no datasheet."""
    devices = [node.device for node in sources.hardware(mesh)]
    if any(device.measured or device.is_host for device in devices):
        return None
    return mesh.devices_per_node * sum(device.flops_per_second(sizes.dtype) for device in devices)
