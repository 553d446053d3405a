"""A node's work: a type for each kind of task run, with only the fields that this kind needs.

A consumer matches on the type of the work and ends with `assert_never`, so mypy finds each consumer that lacks a kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.plan import ModelInstance, OffloadPart, Placement, instance_of
from prefect_rlhf.placement.rows.moves import RowMove
from prefect_rlhf.placement.rows.partition import WHOLE, Part


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model function call. `instance` is the copy of weights that it uses, `reads` their version.

    It works on a `part` of the call's rows.
    """

    kind: ClassVar[Literal["generate", "inference", "train_step"]]
    call: Call
    instance: ModelInstance
    reads: int
    part: Part = WHOLE


@dataclass(frozen=True, slots=True)
class Generate(ModelCall):
    """A call that samples rows."""

    kind = "generate"


@dataclass(frozen=True, slots=True)
class Inference(ModelCall):
    """A call that runs a model forward over rows."""

    kind = "inference"


@dataclass(frozen=True, slots=True)
class TrainStep(ModelCall):
    """A call that trains its instance in place."""

    kind = "train_step"

    @property
    def writes(self) -> int:
        """The weight version that it makes."""
        return self.reads + 1


@dataclass(frozen=True, slots=True)
class Compute:
    """A computation on rows, in a rank or in worker processes on its node. It selects rows if the call has
    `chooses`.
    """

    kind: ClassVar = "compute"
    call: Call


@dataclass(frozen=True, slots=True)
class Transfer:
    """Moves rows to the devices of a call, for a `part` of its rows."""

    kind: ClassVar = "transfer"
    call: Call
    moves: tuple[RowMove, ...]
    part: Part = WHOLE


@dataclass(frozen=True, slots=True)
class Reallocate:
    """Moves weight version `reads` from the instance that trained it to an instance that uses it."""

    kind: ClassVar = "reallocate"
    source: ModelInstance
    target: ModelInstance
    reads: int


@dataclass(frozen=True, slots=True)
class Follow:
    """Averages a leader's version `reads`, from the instance that trained it, with an instance of its follower.

    The leader's weight is `share`, and the rest is the follower's own version `held`. The new version has the number
    `reads`.
    """

    kind: ClassVar = "follow"
    source: ModelInstance
    target: ModelInstance
    reads: int
    held: int
    share: float

    @property
    def writes(self) -> int:
        """The weight version that it makes."""
        return self.reads


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Moves a part of an instance between device and host memory."""

    kind: ClassVar[Literal["offload", "reload"]]
    instance: ModelInstance
    part: OffloadPart
    reads: int
    """The version of its weights."""
    stops_devices: bool
    """Whether its devices cannot compute during the move."""
    copies: bool = True
    """Whether its bytes cross the host link."""


@dataclass(frozen=True, slots=True)
class Offload(HostCopy):
    """Moves to host memory, which frees device memory.

    Without `copies` it drops the part, because the host copy is still the same or the next reallocation overwrites it.
    """

    kind = "offload"


@dataclass(frozen=True, slots=True)
class Reload(HostCopy):
    """Moves from host memory into device memory.

    Without `copies` it only allocates the memory; the first use is then a reallocation, which writes weights v`reads`.
    """

    kind = "reload"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Copies an instance's training state into host memory. `reads` is the version of its weights."""

    kind: ClassVar = "checkpoint"
    instance: ModelInstance
    reads: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Writes all roles' copies to disk."""

    kind: ClassVar = "commit"


@dataclass(frozen=True, slots=True)
class Export:
    """Writes an instance's weight version `reads` as a Hugging Face folder."""

    kind: ClassVar = "export"
    instance: ModelInstance
    reads: int


Work = (
    Generate
    | Inference
    | TrainStep
    | Compute
    | Transfer
    | Reallocate
    | Follow
    | Offload
    | Reload
    | Checkpoint
    | Commit
    | Export
)


def work_of(call: Call, placement: Placement, reads: int | None) -> Work:
    """Return the work of a run of `call`; it reads weight version `reads`, or None if it has no model."""
    instance = instance_of(call, placement)
    if instance is None or reads is None or call.kind == "compute":
        return Compute(call)
    match call.kind:
        case "generate":
            return Generate(call, instance, reads)
        case "inference":
            return Inference(call, instance, reads)
        case "train_step":
            return TrainStep(call, instance, reads)
