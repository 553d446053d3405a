"""The nodes of an augmented graph: every task run of a training run, and its dependencies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.mesh import Device, DeviceMesh
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart, Placement
from prefect_rlhf.placement.rows.moves import RowMove

NodeKind = Literal[
    "generate",
    "inference",
    "train_step",
    "compute",
    "transfer",
    "reallocate",
    "offload",
    "reload",
    "checkpoint",
    "commit",
    "export",
]
DependencyKind = Literal["data", "version", "state", "overwrite", "memory"]
Resource = Literal["compute", "host_link", "disk", "hosts"]
"""A part of a device that a node has to itself: its compute, the link to host memory, over which copies run, the way
from there to disk, with the copy of its training state that is about to be written, or the worker processes of its rank
on the node's CPUs."""
RESOURCES: tuple[Resource, ...] = get_args(Resource)
BEHIND: frozenset[NodeKind] = frozenset({"commit"})
"""Kinds that run behind the next steps: the step that they belong to is over without them."""

_STEP = re.compile(r"(\.v\d+)?@\d+$")  # of a node's id, with the version that an earlier step trained


@dataclass(frozen=True, slots=True)
class Dependency:
    """A node that must have ended, and the reason.

    `data`: it made or brought rows; `version`: it made, brought or copied the weights; `state`: it left the state
    of a stateful computation; `overwrite`: it still reads weights, or a state, to be overwritten in place; `memory`:
    it makes room on the device, or in the host memory that a checkpoint is copied to. `label` says what flows: keys, or
    a weight version.
    """

    node: str
    kind: DependencyKind
    label: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A task run.

    `meshes` are all devices that it occupies. `reads` is the weight version that a call or move uses, `writes` the
    version that it makes. `instance` is the copy of weights that a call uses, that an offload or reload moves, or that
    a checkpoint or export writes; `part` is the part of it that moves. `source` and `target` are set for a reallocate.
    A transfer's `call` and `placement` belong to the call that it feeds. `stops_devices`: its devices compute nothing
    during this offload or reload.
    """

    id: str
    kind: NodeKind
    step: int
    meshes: tuple[DeviceMesh, ...]
    dependencies: tuple[Dependency, ...]
    reason: str
    call: Call | None = None
    placement: Placement | None = None
    instance: ModelInstance | None = None
    source: ModelInstance | None = None
    target: ModelInstance | None = None
    reads: int | None = None
    writes: int | None = None
    moves: tuple[RowMove, ...] = ()
    part: OffloadPart = "all"
    stops_devices: bool = False

    @property
    def devices(self) -> frozenset[Device]:
        """All devices it occupies."""
        return _devices(self.meshes)

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The resources that the node uses on its devices.

        An offload or reload uses their host links, and with some engines their compute. A commit uses their paths to
        disk. A checkpoint uses the compute and the memory that a commit reads. A host call has worker processes. All
        other nodes use the compute.
        """
        if self.kind == "compute" and self.call is not None and self.call.on_hosts:
            return ("hosts",)
        match self.kind:
            case "offload" | "reload":
                return ("compute", "host_link") if self.stops_devices else ("host_link",)
            case "checkpoint":
                return ("compute", "disk")
            case "commit":
                return ("disk",)
        return ("compute",)

    @property
    def occupies(self) -> frozenset[tuple[Device, Resource]]:
        """What it has to itself while it runs."""
        return _occupied(self.meshes, self.resources)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Ids of the nodes that must have ended."""
        return tuple(dependency.node for dependency in self.dependencies)

    @property
    def title(self) -> str:
        """The task run's name: call, step, mesh and strategy, weight version.

        `actor.generate · step 3 · n0:0-1 dp2 · v3`
        """
        parts = (self._subject, f"step {self.step}", self._where, self._version)
        return " · ".join(part for part in parts if part)

    @property
    def _subject(self) -> str:
        if self.kind == "reallocate":
            assert self.source is not None  # set for every reallocate
            return f"{self.source.role}.reallocate"
        if self.kind == "commit":
            return "checkpoint.commit"
        if self.kind == "checkpoint":
            assert self.instance is not None  # set for every checkpoint
            return f"{self.instance.role}.checkpoint"
        if self.kind in ("offload", "reload", "export"):
            assert self.instance is not None  # set for these kinds
            some = "" if self.part == "all" else f" ({self.part})"
            return f"{self.instance.role}.{self.instance.engine}.{self.kind}{some}"
        assert self.call is not None  # every other kind runs or feeds a call
        return f"transfer → {call_title(self.call)}" if self.kind == "transfer" else call_title(self.call)

    @property
    def _where(self) -> str:
        if self.kind == "reallocate":
            assert self.source is not None and self.target is not None  # set for every reallocate
            return " → ".join(f"{i.engine} {i.mesh.name} {i.strategy}" for i in (self.source, self.target))
        if self.kind in ("transfer", "commit"):
            return " + ".join(mesh.name for mesh in self.meshes)
        if self.kind == "compute":
            return self.meshes[0].name
        assert self.instance is not None  # calls with a model, offload and reload
        return f"{self.instance.mesh.name} {self.instance.strategy}"

    @property
    def _version(self) -> str:
        if self.reads is None:
            return ""
        return f"v{self.reads}" if self.kind != "train_step" else f"v{self.reads} → v{self.writes}"


def subject_of(node: str) -> str:
    """Return the action of a node from its id, without the step.

    >>> subject_of("reallocate.actor.vllm@3"), subject_of("reallocate.actor.vllm.v2@3")
    ('reallocate.actor.vllm', 'reallocate.actor.vllm')
    """
    return _STEP.sub("", node)


def call_title(call: Call) -> str:
    """Return role and kind of a call, with its name if the name says more; for a computation its name alone.

    `actor.generate`, `actor.generate_baseline`, `reward.inference (score_baseline)`, `gae`
    """
    if call.role is None:
        return call.name
    plain = call.name.removeprefix(f"{call.role}_")
    if call.kind.startswith(plain):  # `actor_train` is the role's train_step
        return f"{call.role}.{call.kind}"
    if plain.startswith(f"{call.kind}_"):
        return f"{call.role}.{plain}"
    return f"{call.role}.{call.kind} ({plain})"


@lru_cache(maxsize=1024)  # every step has nodes on the same meshes, and is asked several times
def _devices(meshes: tuple[DeviceMesh, ...]) -> frozenset[Device]:
    return frozenset(device for mesh in meshes for device in mesh.devices())


@lru_cache(maxsize=1024)
def _occupied(meshes: tuple[DeviceMesh, ...], resources: tuple[Resource, ...]) -> frozenset[tuple[Device, Resource]]:
    return frozenset((device, resource) for device in _devices(meshes) for resource in resources)
