"""GPU memory while models are built, one after another: what engines need then, but not later.

An offloaded part leaves the device as soon as its instance is built, so instances that later take turns on a device
already do so here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from prefect_rlhf.placement.cost.call_bytes import trial_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.sharing import in_build_order
from prefect_rlhf.placement.memory.holdings import ResidentBytes
from prefect_rlhf.placement.memory.needs import ByteShare
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, instances, offloaded_parts
from prefect_rlhf.placement.rows.shares import most_rows

CACHE = "key-value cache"


class Building:
    """The builds of a plan's instances, in order; empty on CPU, because no device memory limits them there.

    Instances `kept` from another plan of the run are on the devices before all others.
    """

    def __init__(
        self,
        graph: DataflowGraph,
        plan: ExecutionPlan,
        workload: Workload,
        backend: Backend,
        kept: Collection[ModelInstance] = (),
    ) -> None:
        self._workload, self._graph, self._plan = workload, graph, plan
        users = instances(graph, plan) if backend == "cuda" else {}
        built = in_build_order(graph, plan) if users else ()
        in_order = sorted(built, key=lambda instance: instance not in kept)
        self._users: Mapping[ModelInstance, tuple[Call, ...]] = {instance: users[instance] for instance in in_order}
        self._leaves = offloaded_parts(graph, plan)

    def moments(self, held: Sequence[ResidentBytes]) -> Iterator[tuple[str, tuple[ByteShare, ...]]]:
        """Yield each build on a device that will hold `held`, with the device's bytes at the build's fullest moment."""
        of_instance: dict[ModelInstance, list[ResidentBytes]] = defaultdict(list)
        for kept in held:
            of_instance[kept.instance].append(kept)
        stays: list[ByteShare] = []
        for instance, calls in self._users.items():
            if instance not in of_instance:
                continue
            kept_bytes = {kept.what: kept.num_bytes for kept in of_instance[instance]}
            name = f"build {instance.name}"
            for what, moment in self._fullest(instance, calls, kept_bytes).items():
                yield f"{name}: {what}", (*stays, *(ByteShare(name, *item, True) for item in moment.items() if item[1]))
            part = self._leaves.get(instance)
            stays += [
                ByteShare(instance.name, kept.label, kept.num_bytes, False)
                for kept in of_instance[instance]
                if part is None or not kept.moves_with(part)
            ]

    def _fullest(
        self, instance: ModelInstance, calls: tuple[Call, ...], kept: Mapping[str, int]
    ) -> Mapping[str, Mapping[str, int]]:
        """Return the moments of a build that may be fuller than all later moments, each with its bytes by kind."""
        whole = {"all that it keeps": kept}
        if TRAITS[instance.engine].tries_model:
            sizes, tp = ModelSizes.of(self._graph.model(instance.role)).held_by(instance.engine), instance.strategy.tp
            rows = max(most_rows(self._graph, self._plan, calls))
            trial = trial_bytes(rows, self._workload, kept.get(CACHE, 0), sizes, tp)
            before = {what: num_bytes for what, num_bytes in kept.items() if what != CACHE}
            return {**whole, "trial pass": {**before, "trial pass": trial}}
        if "gradients" in kept:
            # Megatron allocates both flat buffers, then moves each weight from its own memory into its buffer
            # (`_ParamAndGradBuffer.__init__`). The optimizer is made after that. A base has no buffer.
            there = {what: size for what, size in kept.items() if what in ("weights", "adapter", "gradients")}
            in_buffers = there.get("adapter", there.get("weights", 0))
            return {**whole, "weights twice": {**there, "weights in buffers": in_buffers}}
        return whole
