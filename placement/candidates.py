"""Every way in which a call may run on each class of meshes, with its time and bytes: what a plan chooses from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from prefect_rlhf.placement.check import ENGINES, problems
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.lease import DeviceKind
from prefect_rlhf.placement.mesh_line import MeshLine
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.presets import strategies

MOST_MICRO_BATCHES = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """`placement` on the first mesh of `mesh_class`. `host_seconds`: to offload, and again to reload, what it offloads.

    Every device holds at least `static_bytes` all the time and `peak_bytes` while the call runs.
    """

    placement: Placement
    mesh_class: int
    seconds: float
    host_seconds: float
    static_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Setting:
    """What all candidates of a graph are counted by. A device may fill `usable_bytes`."""

    graph: DataflowGraph
    line: MeshLine
    workload: Workload
    sources: CostSources
    usable_bytes: int
    kind: DeviceKind


def candidates(call: Call, setting: Setting) -> tuple[Candidate, ...]:
    """All that are legal and fit a device that has nothing else, without those that others beat at everything."""
    found: list[Candidate] = []
    for mesh_class in range(len(setting.line.classes)):
        mesh = setting.line.first_of(mesh_class)
        for strategy in strategies(mesh.num_devices):
            for engine in ENGINES[call.kind]:
                for cuts in _micro_batches(call):
                    placement = Placement(mesh, strategy, engine, cuts)
                    if not any(problems(call, placement, setting.graph)):
                        found += _offloads(call, _candidate(call, placement, mesh_class, setting), setting)
    return tuple(unbeaten(one for one in found if one.peak_bytes <= setting.usable_bytes))


def unbeaten(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """Of those that differ in nothing but micro-batches: each that is faster or smaller than every other."""
    alike: dict[Placement, list[Candidate]] = defaultdict(list)
    for one in found:
        alike[replace(one.placement, micro_batches=1)].append(one)
    for group in alike.values():
        smallest: int | None = None
        for one in sorted(group, key=lambda one: (one.seconds, one.peak_bytes, one.placement.micro_batches)):
            if smallest is None or one.peak_bytes < smallest:
                smallest = one.peak_bytes
                yield one


def _micro_batches(call: Call) -> Iterator[int]:
    cuts = 1
    while cuts <= min(call.num_rows, MOST_MICRO_BATCHES):
        yield cuts
        cuts *= 2


def _candidate(call: Call, placement: Placement, mesh_class: int, setting: Setting) -> Candidate:
    work, execution = CallWork.of(call, setting.workload), Execution.of(placement)
    sizes = ModelSizes.of(setting.graph.model(call.role or ""))
    seconds = setting.sources.call_cost(work, execution, sizes, placement.mesh).total
    on_cpu = setting.kind == "cpu"
    held = [
        call_bytes(work, execution, sizes, placement.engine, stage, on_cpu=on_cpu)
        for stage in sorted({0, placement.strategy.pp - 1})
    ]
    kept = [one.static + (one.kv_cache if placement.engine == "vllm" else 0) for one in held]  # as `certificate` counts
    return Candidate(placement, mesh_class, seconds, 0.0, min(kept), min(one.total for one in held))


def _offloads(call: Call, stays: Candidate, setting: Setting) -> Iterator[Candidate]:
    """It as it is; and where nobody trains the model, in host memory between calls."""
    yield stays
    if setting.graph.trained_by(call.role or "") is None:
        sizes, strategy = ModelSizes.of(setting.graph.model(call.role or "")), stays.placement.strategy
        weights = max(sizes.stage_parameters(strategy, stage) for stage in (0, strategy.pp - 1)) * sizes.item
        links = setting.sources.links((stays.placement.mesh,))
        placement = replace(stays.placement, offload="all")
        yield replace(stays, placement=placement, host_seconds=links.seconds(weights, "host"), static_bytes=0)
