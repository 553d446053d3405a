"""The nodes of an augmented graph: every task run of a training run, and its dependencies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, assert_never

from prefect_rlhf.placement.augmented.resources import Resource, resources_of
from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Commit,
    Compute,
    Export,
    Follow,
    HostCopy,
    ModelCall,
    Reallocate,
    Reload,
    TrainStep,
    Transfer,
    Work,
)
from prefect_rlhf.placement.devices.mesh import Device, DeviceMesh
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.rows.partition import WHOLE, Part

DependencyKind = Literal["data", "version", "state", "overwrite", "memory", "order"]
SWITCH = "switch"
"""The kind of the task run that switches a run between two plans; it is a node of neither plan."""
BEHIND = frozenset({Commit.kind, Export.kind, SWITCH})
"""Kinds that do not count in a step's time: they run during the next steps, after the last step, or between two
steps."""

_STEP = re.compile(r"(\.v\d+)?@\d+$")  # of a node's id, with the version that an earlier step trained


@dataclass(frozen=True, slots=True)
class Dependency:
    """A node that must have ended, and the reason.

    `data`: it makes or brings rows; `version`: it makes, brings or copies weights; `state`: it makes the state of a
    stateful computation; `overwrite`: it must finish reading weights or a state before they are overwritten in place;
    `memory`: it makes room on the device, or in the host memory for a checkpoint's copy; `order`: it is the previous
    part of the same call, or goes first on common devices. `label` names the keys or the weight version that flow.
    """

    node: str
    kind: DependencyKind
    label: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """A task run. `meshes` are all devices that it occupies."""

    id: str
    step: int
    meshes: tuple[DeviceMesh, ...]
    dependencies: tuple[Dependency, ...]
    reason: str
    work: Work

    @property
    def kind(self) -> str:
        """The name of its task, and of its colour in drawings."""
        return self.work.kind

    @property
    def call(self) -> Call | None:
        """The call that it runs or supplies with rows."""
        return self.work.call if isinstance(self.work, ModelCall | Compute | Transfer) else None

    @property
    def part(self) -> Part:
        """Which part of its call's rows it works on or moves; the whole for other work."""
        return self.work.part if isinstance(self.work, ModelCall | Transfer) else WHOLE

    @property
    def reads(self) -> int | None:
        """The weight version that it uses or moves."""
        return None if isinstance(self.work, Compute | Transfer | Commit) else self.work.reads

    @property
    def writes(self) -> int | None:
        """The weight version that it makes."""
        return self.work.writes if isinstance(self.work, TrainStep | Follow) else None

    @property
    def devices(self) -> frozenset[Device]:
        """All devices it occupies."""
        return _devices(self.meshes)

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The resources that it uses on its devices."""
        return resources_of(self.work)

    @property
    def occupies(self) -> frozenset[tuple[Device, Resource]]:
        """The resources that it uses exclusively while it runs."""
        return _occupied(self.meshes, self.resources)

    def shares_with(self, other: Node) -> bool:
        """Return whether both nodes occupy the same resource on some device."""
        overlap = any(mine.overlaps(theirs) for mine in self.meshes for theirs in other.meshes)
        return overlap and not set(self.resources).isdisjoint(other.resources)

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Ids of the nodes that must have ended."""
        return tuple([dependency.node for dependency in self.dependencies])

    def after(self, dependencies: tuple[Dependency, ...]) -> Node:
        """Return the node with these dependencies. Like `replace`, in a third of the time."""
        return Node(self.id, self.step, self.meshes, dependencies, self.reason, self.work)

    @property
    def title(self) -> str:
        """The task run's name: call, step, mesh and strategy, weight version.

        `actor.generate · step 4 · n0:0-1 dp2 · v3`, or `actor.generate · part 2 of 4 · step 4 · n0:0-1 dp2 · v3`
        """
        subject, where, version = _title_parts(self.work, " + ".join(mesh.name for mesh in self.meshes))
        part = str(self.part) if self.part.of > 1 else ""
        return " · ".join(word for word in (subject, part, f"step {self.step}", where, version) if word)


def subject_of(node: str) -> str:
    """Return a node's subject, which is its id without the step.

    >>> subject_of("reallocate.actor.vllm@3"), subject_of("reallocate.actor.vllm.v2@3")
    ('reallocate.actor.vllm', 'reallocate.actor.vllm')
    """
    return _STEP.sub("", node)


def call_title(call: Call) -> str:
    """Return a call's role and kind, and its name if that adds information; for a computation only its name.

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


def _title_parts(work: Work, meshes: str) -> tuple[str, str, str]:
    """Return the subject, the place and the weight version; the version is empty for work without weights."""
    match work:
        case TrainStep(call, instance, version):
            return call_title(call), _place(instance), f"v{version} → v{work.writes}"
        case ModelCall(call, instance, version):
            return call_title(call), _place(instance), f"v{version}"
        case Compute(call):
            return call_title(call), meshes, ""
        case Transfer(call):
            return f"transfer → {call_title(call)}", meshes, ""
        case Reallocate() | Follow():
            return _moved_weights(work)
        case HostCopy(instance, part, version):
            words = [word for word in (part, _without_copy(work)) if word not in ("all", "")]
            some = f" ({', '.join(words)})" if words else ""
            return f"{instance.role}.{instance.engine}.{work.kind}{some}", _place(instance), f"v{version}"
        case Checkpoint(instance, version):
            return f"{instance.role}.checkpoint", _place(instance), f"v{version}"
        case Commit():
            return "checkpoint.commit", meshes, ""
        case Export(instance, version):
            return f"{instance.role}.{instance.engine}.export", _place(instance), f"v{version}"
        case _:
            assert_never(work)


def _moved_weights(work: Reallocate | Follow) -> tuple[str, str, str]:
    engines = " → ".join(f"{instance.engine} {_place(instance)}" for instance in (work.source, work.target))
    if isinstance(work, Reallocate):
        return f"{work.source.role}.reallocate", engines, f"v{work.reads}"
    return f"{work.target.role}.follow of {work.source.role}", engines, f"v{work.held} → v{work.writes}"


def _without_copy(work: HostCopy) -> str:
    """Return the word for a move without a copy; empty for a copy."""
    if work.copies:
        return ""
    return "no weights" if isinstance(work, Reload) else "dropped"


def _place(instance: ModelInstance) -> str:
    return f"{instance.mesh.name} {instance.strategy}"


@lru_cache(maxsize=1024)  # every step has nodes on the same meshes, and is asked several times
def _devices(meshes: tuple[DeviceMesh, ...]) -> frozenset[Device]:
    return frozenset(device for mesh in meshes for device in mesh.devices())


@lru_cache(maxsize=1024)
def _occupied(meshes: tuple[DeviceMesh, ...], resources: tuple[Resource, ...]) -> frozenset[tuple[Device, Resource]]:
    return frozenset((device, resource) for device in _devices(meshes) for resource in resources)
