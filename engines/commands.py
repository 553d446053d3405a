"""The controller's commands to a rank, and the rank's reports: small picklable values, never tensors.

A row's name is its position in the step's batch, so every rank uses the same number for it. Frequent messages have no
slots, because dataclasses with slots are pickled by slow Python code.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from prefect_rlhf.engines.engine import PlaySettings, SamplingSettings, StateKind, TrainSettings
from prefect_rlhf.engines.losses.protocol import LossTerm
from prefect_rlhf.engines.rows import ColumnKind
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.layout.regions import Region, intersection
from prefect_rlhf.placement.models.model import Dtype, ModelSpec
from prefect_rlhf.placement.models.weights import Weights
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.rows.tokenizers import Tokenizers

FINGERPRINT_MODULUS = 2**64
Bytes = TypeVar("Bytes", int, Mapping[str, int])
"""A number for a single rank, rank -> number for several."""


@dataclass(frozen=True)
class Digest:
    """A rank's share of each parameter's weight fingerprint, from its shards, modulo FINGERPRINT_MODULUS.

    It has two strings: `names`, a line each, and `values`, 8 bytes each. Most ranks report the same digest as other
    ranks, which is only compared and never read.
    """

    names: str
    values: bytes

    @classmethod
    def of(cls, by_name: Mapping[str, int]) -> Digest:
        """Return the digest with these values.

        >>> Digest.of({"norm": 7, "w": 2**64 - 1}).by_name()
        {'norm': 7, 'w': 18446744073709551615}
        """
        return cls("\n".join(by_name), array("Q", by_name.values()).tobytes())

    def by_name(self) -> dict[str, int]:
        """Return each parameter's value."""
        return dict(zip(self.names.splitlines(), array("Q", self.values), strict=True))


class RowSource(Protocol):
    """A dataset for a rank: it is pickled as its settings and opened in the process that uses it."""

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    @property
    def column_kinds(self) -> Mapping[str, ColumnKind]: ...

    @property
    def variables(self) -> Mapping[str, Any]:
        """The chat template's variables."""
        ...

    @property
    def eos_token(self) -> str | None:
        """The text of the token that ends an answer, if a setting states it."""
        ...

    @property
    def template(self) -> str | None:
        """The text of the chat template, if a setting states it."""
        ...

    def read(self, row_ids: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        """Return rows in the requested order: `prompt_tokens` (lists of ids), or tokens and their further keys."""
        ...

    def read_column(self, name: str, row_ids: Sequence[int]) -> list[Any]:
        """Return the rows' values in one of the file's columns, as plain Python values; None for null."""
        ...


@dataclass(frozen=True, slots=True)
class Restore:
    """A checkpoint's folder, and the version of the trained weights in it.

    Without a folder, ranks have the state in host memory, and send it after the build (`MoveStateCommand`).
    """

    folder: Path | None
    version: int


@dataclass(frozen=True, slots=True)
class BuildCommand:
    """Build a model instance and load its weights."""

    model: ModelSpec
    instance: ModelInstance
    ranks: tuple[int, ...]
    """In the order of the instance's mesh."""
    layout: Layout
    max_sequence_length: int
    max_rows: int
    """The most rows that this rank's replica generates at once."""
    cache_bytes: int | None = None
    """Of vLLM's cache; None makes room for `max_rows` rows of the greatest length."""
    cuda_graphs: bool = True
    is_offloaded: bool = False
    """Whether the plan moves the whole instance between device and host."""
    restore: Restore | None = None
    """Where trained weights come from; None takes them from the model's folder."""
    end_tokens: tuple[int, ...] | None = None
    """The tokens that end a response; None takes them from the model's folder."""
    weights: tuple[Weights, ...] = ()
    """What the engine holds; empty means a single trained set, named after the role."""
    shared: Mapping[str, ModelInstance] = field(default_factory=dict)
    """Weights, by name, whose tensors another instance has that was built before."""
    seed: int = 0
    """Draws a new adapter."""

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of its trained weights, which name their folders in a checkpoint."""
        return tuple(own.name for own in self.weights if own.trained) if self.weights else (self.instance.role,)

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that no train_step writes."""
        return frozenset(parameter.name for own in self.weights if not own.trained for parameter in own.parameters)

    @property
    def name_of(self) -> Mapping[str, str]:
        """The name of the weights that each parameter belongs to; empty without weights."""
        return {parameter.name: own.name for own in self.weights for parameter in own.parameters}


@dataclass(frozen=True)
class PassCommand:
    """A train_step's pass over the rows of one row set, with their losses; `call` is the step on only these rows.

    `rows` to `lengths` are as in a CallCommand, the rest as in TrainingRows.
    """

    call: Call
    terms: tuple[LossTerm, ...]
    rows: tuple[int, ...]
    row_ids: tuple[int, ...]
    keys: frozenset[str] | None = None
    lengths: tuple[int, ...] = ()
    mini_batch_rows: tuple[int, ...] = ()
    some_without_rows: bool = False


@dataclass(frozen=True)
class CallCommand:
    """Run a call on this rank's rows.

    A call uses only the settings of its kind: `sampling` and perhaps `play` (generate), `train` and `passes`
    (train_step), `output` and `temperature` (inference), `function` (compute).
    """

    step: int
    call: Call
    instance: ModelInstance | None
    rows: tuple[int, ...]
    """Positions in the step's batch."""
    row_ids: tuple[int, ...]
    """The same rows' numbers in the dataset."""
    seed: int
    run_dir: Path
    tokenizers: Tokenizers
    micro_batches: int = 1
    reads: int | None = None
    """The weight version of the instance that it uses; `writes` is the version that it makes."""
    writes: int | None = None
    function: Callable[..., Any] | None = None  # the call's operation, imported by the process that runs it
    passes: tuple[PassCommand, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    """The weight version of each role that contributed to the rows so far."""
    generated_by: str | None = None
    """The role that generated the rows."""
    keys: frozenset[str] | None = None
    """The input keys that this rank's pipeline stage uses; None means all."""
    lengths: tuple[int, ...] = ()
    """Each row's length in tokens, if a generate reported it."""
    frees: tuple[tuple[str, str], ...] = ()
    """The rows of (call, key) that no later node of this step uses on this rank."""
    sampling: SamplingSettings | None = None
    play: PlaySettings | None = None
    train: TrainSettings | None = None
    output: str = "logprobs"
    temperature: float = 1.0

    def on(self, rows: PassCommand) -> CallCommand:
        """Return the command of a train_step on the rows of one pass."""
        return replace(
            self, call=rows.call, rows=rows.rows, row_ids=rows.row_ids, keys=rows.keys, lengths=rows.lengths, passes=()
        )

    @property
    def doing(self) -> str:
        """The call's name in errors: `actor_generate · step 3`."""
        return f"{self.call.name} · step {self.step}"


class RowTransfer(NamedTuple):
    """Rows of a call's keys that rank `source` sends to another rank, `target`."""

    source: int
    target: int
    call: str
    keys: tuple[str, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class TransferCommand:
    """A node's row transfers from or to this rank, in the same order on all ranks. For `frees` see CallCommand."""

    step: int
    transfers: tuple[RowTransfer, ...]
    frees: tuple[tuple[str, str], ...] = ()

    def __reduce__(self) -> tuple[Callable[..., TransferCommand], tuple[Any, ...]]:
        """Pickle the transfers as plain tuples: named tuples take ten times as long."""
        return _transfer_command, (self.step, tuple(map(tuple, self.transfers)), self.frees)


def _transfer_command(step: int, transfers: Sequence[Any], frees: tuple[tuple[str, str], ...]) -> TransferCommand:
    return TransferCommand(step, tuple(map(RowTransfer._make, transfers)), frees)


@dataclass(frozen=True)
class MoveWeightsCommand:
    """Copy version `version` of a role from an instance's storage into another instance's (reallocate).

    `devices[rank]` is a rank's device, so that near copies are preferred; if empty, all are equally near.
    """

    source: ModelInstance
    target: ModelInstance
    version: int
    source_layout: Layout
    target_layout: Layout
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True)
class FollowCommand:
    """Average the version that a follower holds with its leader's version."""

    move: MoveWeightsCommand
    """Brings the leader's version; its layouts are those of the weights that the follower writes."""
    held: int
    """The follower's version."""
    share: float
    """The weight of the leader's version in the average."""
    dtype: Dtype
    """The leader's format."""
    is_copy: bool
    """Whether the new version equals the leader's bit for bit."""


class GpuMemory(NamedTuple):
    """A GPU's memory in bytes: the peak since the rank's last report, and what the driver has free now."""

    allocated_bytes: int
    """Torch's tensors."""
    reserved_bytes: int
    """The device memory that torch reserves for them."""
    used_bytes: int
    """The driver's count, including other processes, contexts, communicators and the driver's graphs."""
    free_bytes: int


class StateRegion(NamedTuple):
    """A region of a parameter's main weights or of a moment, in float32."""

    kind: StateKind
    parameter: str
    region: Region


class StateMove(NamedTuple):
    """The elements in `held` of rank `source` that `lacking` of rank `target` needs; the ranks may be equal."""

    source: int
    target: int
    kind: StateKind
    parameter: str
    held: Region
    lacking: Region

    @property
    def common(self) -> Region:
        """The elements that move."""
        found = intersection(self.held, self.lacking)
        assert found is not None  # otherwise there is no move
        return found


@dataclass(frozen=True)
class MoveStateCommand:
    """Fill `target`, which was built without its state, from the copies of `source` in the host memory of ranks.

    First come the weights alone, then, with `is_last`, the optimizer, which has made `num_updates` steps.
    """

    source: ModelInstance
    target: ModelInstance
    version: int
    num_updates: int
    moves: tuple[StateMove, ...]
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class Measurements(Generic[Bytes]):
    """The time, data and memory of a piece of work, for a rank or for all ranks of a node (then memory by rank)."""

    seconds: float
    """By the rank's own clock."""
    fingerprint_seconds: float = 0.0
    bytes_moved: int = 0
    """What came from other ranks; for offload and reload, from or to the host."""
    num_tokens: int = 0
    peak_extra_bytes: int = 0
    """The peak of memory staged for the work."""
    device_bytes: Bytes
    """The storages of all tensors that engines keep on the device between calls, also if a call runs now."""
    resident_bytes: Bytes
    """The process's memory by the operating system's count; on a CPU device it confirms `device_bytes`."""
    store_bytes: Bytes
    """The rows that are still kept."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_rows: Mapping[str, int] = field(default_factory=dict)
    """How many rows, answers or tokens a metric is the mean of; a metric without an entry is a mean over all tokens."""


@dataclass(frozen=True, kw_only=True)
class RankReport(Measurements[int]):
    """A rank's reply to a command."""

    digest: Digest | None = None
    """Set after weights were written."""
    row_lengths: tuple[int, ...] = ()
    """The lengths of a generate's rows in tokens, in order."""
    chosen_rows: tuple[int, ...] = ()
    """The numbers of the rows that a call selected."""
    state: Mapping[str, Any] | InvalidInput | None = None
    """What a stateful computation hands to the next step, in a checkpoint's form; the error if it cannot be saved."""
    gpu: GpuMemory | None = None
    """Its GPU's memory; None on CPU."""
