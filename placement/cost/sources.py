"""Sources of times for each node of a cluster: a given profile, or else the device's datasheet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.call import call_cost, train_step_costs
from prefect_rlhf.placement.cost.contention import SharedWork, SlowDown, working_share
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware, Links
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.layer_times import LayerTimes
from prefect_rlhf.placement.cost.times.profile import Profile, ProfiledTimes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.plan import EngineKind, ModelInstance, Recompute

MOST_KEPT = 50_000  # costs; plans of a search share most of them, and memory has to end somewhere


@dataclass(frozen=True, slots=True)
class CostSources:
    """Each node's hardware (`nodes[i]` is the i-th node's), and profiles, which hold for devices of their name.

    Devices of a kind that has profiles need a profile for every shape in question. Each model's times are made once.
    `orchestration_seconds` is how much the controller adds to every node's time.
    """

    nodes: tuple[Hardware, ...]
    profiles: tuple[Profile, ...] = ()
    orchestration_seconds: float = 0.0
    _times: dict[tuple[Hardware, ModelSizes, EngineKind], LayerTimes] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    _kept: dict[object, Seconds] = field(default_factory=dict, init=False, repr=False, compare=False, hash=False)
    _distinct: dict[DeviceMesh, tuple[Hardware, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    @classmethod
    def equal_nodes(cls, hardware: Hardware, num_nodes: int, profiles: Iterable[Profile] = ()) -> CostSources:
        """Return sources for nodes that are all the same."""
        return cls((hardware,) * num_nodes, tuple(profiles))

    def times(self, sizes: ModelSizes, hardware: Hardware, engine: EngineKind = "megatron") -> LayerTimes:
        """Return the times of a model's layers in an engine, on a kind of node."""
        key = hardware, sizes, engine
        if key not in self._times:
            self._times[key] = self._make(sizes, hardware, engine)
        return self._times[key]

    def call_cost(self, work: CallWork, execution: Execution, sizes: ModelSizes, mesh: DeviceMesh) -> Seconds:
        """Return a call's seconds on a mesh. If its nodes differ, the slowest kind counts, because the others wait for
        it.
        """
        return self.slowest(((work, hardware) for hardware in self.distinct_hardware(mesh)), execution, sizes)

    def slowest(self, shares: Iterable[tuple[CallWork, Hardware]], execution: Execution, sizes: ModelSizes) -> Seconds:
        """Return a call's time in seconds if its shares run concurrently, each on one kind of node."""
        costs = (
            self._on_its_host(
                call_cost(work, execution, self.times(sizes, node, execution.engine)), work, execution, sizes, node
            )
            for work, node in shares
        )
        return max(costs, key=lambda cost: cost.total) + Seconds(orchestration=self.orchestration_seconds)

    def train_step_costs(
        self, work: CallWork, execution: Execution, sizes: ModelSizes, mesh: DeviceMesh, recomputes: Sequence[Recompute]
    ) -> list[Seconds]:
        """Return a train_step's `call_cost` for each number of recomputed layers in `recomputes`."""
        by_node = [
            [
                self._on_its_host(cost, work, execution, sizes, node)
                for cost in train_step_costs(work, execution, self.times(sizes, node, execution.engine), recomputes)
            ]
            for node in self.distinct_hardware(mesh)
        ]
        started = Seconds(orchestration=self.orchestration_seconds)
        return [max(costs, key=lambda cost: cost.total) + started for costs in zip(*by_node, strict=True)]

    def kept(self, key: object, cost: Callable[[], Seconds]) -> Seconds:
        """Return `cost()`, computed once per key. These sources and the key determine the cost."""
        known = self._kept.get(key)
        if known is None:
            known = cost()
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = known
        return known

    def slow_down(
        self, work: SharedWork, engine: EngineKind, hardware: Hardware, sizes: ModelSizes | None = None
    ) -> SlowDown | None:
        """Return how a kind of work, of a model or any, slows down with busy devices of a host; None if unknown."""
        measured = self._profiles(hardware, sizes)
        return measured[0].slow_down(work, engine) if measured else None

    @property
    def knows_contention(self) -> bool:
        """Whether it is known that devices of a host slow each other."""
        return any(profile.slow_downs for profile in self.profiles)

    def _on_its_host(
        self, cost: Seconds, work: CallWork, execution: Execution, sizes: ModelSizes, node: Hardware
    ) -> Seconds:
        """The call's time in seconds on an otherwise idle host. A profile measures with all devices busy."""
        slow_down = self.slow_down(work.kind, execution.engine, node, sizes)
        if slow_down is None:
            return cost
        return cost.times(slow_down.of_profiled(execution.devices_per_node * working_share(cost)))

    def written_seconds(self, instance: ModelInstance, sizes: ModelSizes) -> float:
        """Return the cost that new weights cause in an instance, in addition to writing them."""
        return self._written_seconds(instance, sizes, sizes.fullest_stage_parameters(instance.strategy))

    def _written_seconds(self, instance: ModelInstance, sizes: ModelSizes, parameters: int) -> float:
        nodes = self.distinct_hardware(instance.mesh)
        return max(self.times(sizes, node, instance.engine).written(parameters) for node in nodes)

    def taken_seconds(self, instance: ModelInstance, sizes: ModelSizes) -> float:
        """Return the cost of bringing new weights into an instance, including their fingerprint but not their bytes."""
        pp, nodes = instance.strategy.pp, self.distinct_hardware(instance.mesh)
        layers = max(sizes.stage_layers(pp, stage) for stage in (0, pp - 1))
        taken = max(self.times(sizes, node, instance.engine).taken(layers) for node in nodes)
        return taken + self._written_seconds(instance, sizes, sizes.most_trained(instance.strategy))

    def links(self, meshes: Iterable[DeviceMesh]) -> Links:
        """Return the slower of each link among the nodes of several meshes, for a device on an otherwise idle host."""
        by_kind = [
            self._links(kind)
            for kind in dict.fromkeys(kind for mesh in meshes for kind in self.distinct_hardware(mesh))
        ]
        return Links(
            min(links.device for links in by_kind),
            min(links.node for links in by_kind),
            min(links.network for links in by_kind),
            min(links.host for links in by_kind),
            max(links.latency_seconds for links in by_kind),
            max(links.network_latency_seconds for links in by_kind),
        )

    def distinct_hardware(self, mesh: DeviceMesh) -> tuple[Hardware, ...]:
        """Return the distinct values of `hardware`, computed once for each mesh."""
        if mesh not in self._distinct:
            self._distinct[mesh] = tuple(dict.fromkeys(self.hardware(mesh)))
        return self._distinct[mesh]

    def hardware(self, mesh: DeviceMesh) -> tuple[Hardware, ...]:
        """Return the hardware of a mesh's nodes. Between nodes, the slowest of their networks counts."""
        end = mesh.first_node + mesh.num_nodes
        if end > len(self.nodes):
            raise InvalidInput("mesh", mesh.name, f"nodes 0 to {len(self.nodes) - 1}, whose hardware is known")
        nodes = self.nodes[mesh.first_node : end]
        networks = {node.network for node in nodes}
        if len(networks) == 1:
            return nodes
        slowest = min((n for n in networks if n), key=lambda n: n.node_bytes_per_second) if all(networks) else None
        return tuple(replace(node, network=slowest) for node in nodes)

    def _links(self, hardware: Hardware) -> Links:
        measured = self._profiles(hardware)
        if not measured:
            return hardware.links()
        slow_down = self.slow_down("move", "megatron", hardware)
        return measured[0].links if slow_down is None else measured[0].links.faster(1 / slow_down.of_profiled(1))

    def _profiles(self, hardware: Hardware, sizes: ModelSizes | None = None) -> tuple[Profile, ...]:
        """The profiles of a kind of device, for a single model or for all."""
        return tuple(
            profile
            for profile in self.profiles
            if profile.device == hardware.device.name
            and (sizes is None or ModelSizes.of_shape(profile.shape, sizes.head, profile.dtype) == sizes.base)
        )

    def _make(self, sizes: ModelSizes, hardware: Hardware, engine: EngineKind) -> LayerTimes:
        if not self._profiles(hardware):
            return DatasheetTimes.of(sizes, hardware, engine)
        if profiles := self._profiles(hardware, sizes):
            return ProfiledTimes(profiles[0], sizes, engine)
        device = hardware.device.name
        asked = f"{sizes.num_layers} layers of {sizes.hidden} in {sizes.dtype}"
        raise InvalidInput(
            f"profiles of {device}", f"no profile of {asked}", "a profile of each model: run rlhf/profile"
        )
