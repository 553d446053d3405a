"""An execution plan: which mesh, strategy and engine each call gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prefect_rlhf.placement.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.strategy import Strategy

EngineKind = Literal["megatron", "vllm", "python"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how one call runs.

    `micro_batches` is per data-parallel replica and mini-batch. `offload` sends the weights this call uses to host
    memory whenever no call is using them. `python` is the engine of compute calls, which use one device's host CPU.
    """

    mesh: DeviceMesh
    strategy: Strategy
    engine: EngineKind
    micro_batches: int = 1
    offload: bool = False

    @property
    def name(self) -> str:
        """`n0:0-1 dp2`, as task run names show it."""
        return f"{self.mesh.name} {self.strategy}"


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
