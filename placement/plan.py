"""An execution plan: which mesh, strategy and engine each call gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prefect_rlhf.placement.mesh import ClusterShape, Device, DeviceMesh
from prefect_rlhf.placement.strategy import Strategy

EngineKind = Literal["megatron", "vllm", "python"]
Offload = Literal["none", "optimizer", "all"]
"""What leaves device memory between uses: nothing, the optimizer's state and gradients, or the whole instance."""
Part = Literal["all", "optimizer"]
"""What of an instance an offload moves: the whole, or main weights, moments and gradients of a trained one."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how one call runs.

    `micro_batches` is per data-parallel replica and mini-batch; with vLLM, how many times fewer rows than a replica has
    its key-value cache holds at once. `offload` says what of the instance that this call uses
    is in host memory whenever no call is using it. `order` are the mesh's devices, by position, in the order of the
    strategy's coordinates; empty: as the mesh lists them. `python` is the engine of compute calls, which use one
    device's host CPU.
    """

    mesh: DeviceMesh
    strategy: Strategy
    engine: EngineKind
    micro_batches: int = 1
    offload: Offload = "none"
    order: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """`n0:0-1 dp2`, as task run names show it."""
        return f"{self.mesh.name} {self.strategy}"

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in the order of the strategy's coordinates."""
        return ordered_devices(self.mesh, self.order)


@dataclass(frozen=True, slots=True)
class ModelInstance:
    """One resident copy of a role's weights: calls that share role, engine, mesh and strategy share it.

    >>> ModelInstance("actor", "vllm", DeviceMesh(0, 1, 0, 2), Strategy(dp=2)).name
    'actor.vllm n0:0-1 dp2'
    """

    role: str
    engine: EngineKind
    mesh: DeviceMesh
    strategy: Strategy
    order: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices in the order of the strategy's coordinates."""
        return ordered_devices(self.mesh, self.order)

    @property
    def name(self) -> str:
        return f"{self.role}.{self.engine} {self.mesh.name} {self.strategy}"


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A placement for every call of a graph, on one cluster."""

    name: str
    cluster: ClusterShape
    placements: tuple[tuple[str, Placement], ...]

    def __getitem__(self, call: str) -> Placement:
        return self.by_call[call]

    @property
    def by_call(self) -> Mapping[str, Placement]:
        return dict(self.placements)


def ordered_devices(mesh: DeviceMesh, order: tuple[int, ...]) -> tuple[Device, ...]:
    """The mesh's devices in the order of the positions given; as the mesh lists them when none are.

    >>> [str(device) for device in ordered_devices(DeviceMesh(0, 1, 0, 4), (0, 2, 1, 3))]
    ['n0:0', 'n0:2', 'n0:1', 'n0:3']
    """
    devices = mesh.devices()
    return tuple(devices[position] for position in order) if order else devices
