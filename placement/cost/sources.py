"""Where times come from on each node of a cluster: a profile where one is given, else the device's datasheet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.datasheet import DatasheetTimes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.hardware import Hardware, Links
from prefect_rlhf.placement.cost.layer_times import LayerTimes
from prefect_rlhf.placement.cost.profile import Profile, ProfiledTimes
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.mesh import DeviceMesh
from prefect_rlhf.placement.plan import EngineKind, ModelInstance


@dataclass(frozen=True, slots=True)
class CostSources:
    """`nodes[i]` is the hardware of the i-th node; `profiles` were checked and hold for devices of their name.

    Devices of a kind that has profiles need one for every shape that is asked about. Each model's times are made once.
    `orchestration_seconds` is what a run's controller adds to every node: what a step takes beyond its ranks' work.
    """

    nodes: tuple[Hardware, ...]
    profiles: tuple[Profile, ...] = ()
    orchestration_seconds: float = 0.0
    _made: dict[tuple[Hardware, ModelSizes, EngineKind], LayerTimes] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )
    _kinds: dict[DeviceMesh, tuple[Hardware, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    @classmethod
    def equal_nodes(cls, hardware: Hardware, num_nodes: int, profiles: Iterable[Profile] = ()) -> CostSources:
        """For nodes that are all the same."""
        return cls((hardware,) * num_nodes, tuple(profiles))

    def times(self, sizes: ModelSizes, hardware: Hardware, engine: EngineKind = "megatron") -> LayerTimes:
        """Of one model's layers in one engine on one kind of node."""
        key = hardware, sizes, engine
        if key not in self._made:
            self._made[key] = self._make(sizes, hardware, engine)
        return self._made[key]

    def call_cost(self, work: CallWork, execution: Execution, sizes: ModelSizes, mesh: DeviceMesh) -> Seconds:
        """Seconds of a call on a mesh; where its nodes differ, on the slowest kind, which the others wait for."""
        return self.slowest(((work, kind) for kind in self.kinds(mesh)), execution, sizes)

    def slowest(self, shares: Iterable[tuple[CallWork, Hardware]], execution: Execution, sizes: ModelSizes) -> Seconds:
        """Seconds of a call whose shares run side by side, each on one kind of node."""
        costs = (call_cost(work, execution, self.times(sizes, kind, execution.engine)) for work, kind in shares)
        return max(costs, key=lambda cost: cost.total) + Seconds(orchestration=self.orchestration_seconds)

    def written_seconds(self, instance: ModelInstance, sizes: ModelSizes) -> float:
        """What it costs that an instance's weights were written, besides the writing."""
        parameters = max(sizes.stage_parameters(instance.strategy, s) for s in {0, instance.strategy.pp - 1})
        kinds = self.kinds(instance.mesh)
        return max(self.times(sizes, kind, instance.engine).written(parameters) for kind in kinds)

    def links(self, meshes: Iterable[DeviceMesh]) -> Links:
        """The slower of each link among the nodes of some meshes."""
        found = [self._links(kind) for kind in dict.fromkeys(kind for mesh in meshes for kind in self.kinds(mesh))]
        return Links(
            min(links.device for links in found),
            min(links.node for links in found),
            min(links.network for links in found),
            min(links.host for links in found),
            max(links.latency_seconds for links in found),
        )

    def kinds(self, mesh: DeviceMesh) -> tuple[Hardware, ...]:
        """The different ones of `hardware`, found once for each mesh."""
        if mesh not in self._kinds:
            self._kinds[mesh] = tuple(dict.fromkeys(self.hardware(mesh)))
        return self._kinds[mesh]

    def hardware(self, mesh: DeviceMesh) -> tuple[Hardware, ...]:
        """Of each node of a mesh. Between nodes the slowest of their networks counts."""
        end = mesh.first_node + mesh.num_nodes
        if end > len(self.nodes):
            raise InvalidInput("mesh", mesh.name, f"nodes 0 to {len(self.nodes) - 1}, whose hardware is known")
        found = self.nodes[mesh.first_node : end]
        networks = {kind.network for kind in found}
        if len(networks) == 1:
            return found
        slowest = min((n for n in networks if n), key=lambda n: n.node_bytes_per_second) if all(networks) else None
        return tuple(replace(kind, network=slowest) for kind in found)

    def _links(self, hardware: Hardware) -> Links:
        measured = [profile.links for profile in self.profiles if profile.device == hardware.device.name]
        return measured[0] if measured else hardware.links()

    def _make(self, sizes: ModelSizes, hardware: Hardware, engine: EngineKind) -> LayerTimes:
        device = hardware.device.name
        here = [profile for profile in self.profiles if profile.device == device]
        if not here:
            return DatasheetTimes.of(sizes, hardware)
        for profile in here:
            if ModelSizes.of_shape(profile.shape, sizes.head, profile.dtype) == sizes:
                return ProfiledTimes(profile, sizes, engine)
        asked = f"{sizes.num_layers} layers of {sizes.hidden} in {sizes.dtype}"
        raise InvalidInput(f"profiles of {device}", f"none of {asked}", "one for each model: run rlhf/profile")
