"""Commands of the controller to a rank, and the rank's reports: small picklable values, never tensors.

A row is named by its position in the step's batch, so every rank means the same row by the same number. What goes to or
comes from each rank in every call has no slots, since dataclasses pickle those by slow Python code.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from prefect_rlhf.engines.engine import SamplingSettings, TrainSettings
from prefect_rlhf.engines.loss import LossTerm, Output
from prefect_rlhf.engines.rows import ColumnKind
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import Call
from prefect_rlhf.placement.layout.layout import Layout
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.model import ModelSpec
from prefect_rlhf.placement.plan import ModelInstance

FINGERPRINT_MODULUS = 2**64
Bytes = TypeVar("Bytes", int, Mapping[str, int])
"""Of one rank a number, of several rank -> number."""


@dataclass(frozen=True)
class Digest:
    """What a rank's shards contribute to the weight fingerprint of each parameter, modulo FINGERPRINT_MODULUS.

    Two strings, `names` in lines and `values` of 8 bytes each: most ranks report what others report too, which is then
    compared and never read.
    """

    names: str
    values: bytes

    @classmethod
    def of(cls, by_name: Mapping[str, int]) -> Digest:
        """Return the digest that has these values.

        >>> Digest.of({"norm": 7, "w": 2**64 - 1}).by_name()
        {'norm': 7, 'w': 18446744073709551615}
        """
        return cls("\n".join(by_name), array("Q", by_name.values()).tobytes())

    def by_name(self) -> dict[str, int]:
        """Return the value of each parameter."""
        return dict(zip(self.names.splitlines(), array("Q", self.values), strict=True))


class RowSource(Protocol):
    """A dataset as a rank reads it: picklable by its settings, opened where it is used."""

    @property
    def name(self) -> str: ...

    @property
    def keys(self) -> tuple[str, ...]: ...

    def __len__(self) -> int: ...

    @property
    def column_kinds(self) -> Mapping[str, ColumnKind]: ...

    def read(self, row_ids: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        """Return rows in the order asked for: `prompt_tokens` (lists of ids), or tokens and what goes with them."""
        ...

    def read_column(self, name: str, row_ids: Sequence[int]) -> list[Any]:
        """Return the values of a column of the file for rows, as plain Python values; None for null."""
        ...


@dataclass(frozen=True, slots=True)
class Restore:
    """The folder of a trained role's state on disk, and the weight version that it is."""

    folder: Path
    version: int


@dataclass(frozen=True, slots=True)
class BuildCommand:
    """Build one model instance on `ranks` (in the mesh's order) and load its weights, from `restore` if it is given.

    `max_rows` are the most of one generate. vLLM's cache has `cache_bytes`, or room for all of them at their longest.
    """

    model: ModelSpec
    instance: ModelInstance
    ranks: tuple[int, ...]
    layout: Layout
    max_sequence_length: int
    max_rows: int
    cache_bytes: int | None = None
    cuda_graphs: bool = True
    restore: Restore | None = None


@dataclass(frozen=True)
class PassCommand:
    """The rows of one row set that a train_step works on, and the losses on them: `call` is the step on these alone.

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
    """Run one call on this rank's rows.

    `rows` are positions in the step's batch; `row_ids` the same rows' numbers in the dataset. `reads` and `writes` are
    weight versions of the instance. `versions` says which version of each role had a part in the rows so far,
    `generated_by` which role generated them. `keys` are those of its inputs that this rank's pipeline stage uses (None:
    all), `lengths` the tokens of each row where a generate reported them. `frees` are the (call, key) of this step that
    no later node uses on this rank. Of `sampling` (generate), `train` and `passes` (train_step), `output` and
    `temperature` (inference), `function` (compute) a call uses its kind's own.
    """

    step: int
    call: Call
    instance: ModelInstance | None
    rows: tuple[int, ...]
    row_ids: tuple[int, ...]
    seed: int
    run_dir: Path
    tokenizer: str
    micro_batches: int = 1
    reads: int | None = None
    writes: int | None = None
    function: Callable[..., Any] | None = None  # the call's operation, resolved where it runs
    passes: tuple[PassCommand, ...] = ()
    versions: Mapping[str, int] = field(default_factory=dict)
    generated_by: str | None = None
    keys: frozenset[str] | None = None
    lengths: tuple[int, ...] = ()
    frees: tuple[tuple[str, str], ...] = ()
    sampling: SamplingSettings | None = None
    train: TrainSettings | None = None
    output: Output = "logprobs"
    temperature: float = 1.0

    def on(self, rows: PassCommand) -> CallCommand:
        """Return the command of a train_step on the rows of one pass alone."""
        return replace(
            self, call=rows.call, rows=rows.rows, row_ids=rows.row_ids, keys=rows.keys, lengths=rows.lengths, passes=()
        )

    @property
    def doing(self) -> str:
        """The name in errors: `actor_generate · step 3`."""
        return f"{self.call.name} · step {self.step}"


class RowTransfer(NamedTuple):
    """Rows of one call's keys that go from rank `source` to rank `target` (not equal)."""

    source: int
    target: int
    call: str
    keys: tuple[str, ...]
    rows: tuple[int, ...]


@dataclass(frozen=True)
class TransferCommand:
    """The row transfers of one node that this rank has a part in, in one order on all. `frees`: see CallCommand."""

    step: int
    transfers: tuple[RowTransfer, ...]
    frees: tuple[tuple[str, str], ...] = ()

    def __reduce__(self) -> tuple[Callable[..., TransferCommand], tuple[Any, ...]]:
        """Pickle the transfers as plain tuples, which takes a tenth of the time that named ones take."""
        return _transfer_command, (self.step, tuple(map(tuple, self.transfers)), self.frees)


def _transfer_command(step: int, transfers: Sequence[Any], frees: tuple[tuple[str, str], ...]) -> TransferCommand:
    return TransferCommand(step, tuple(map(RowTransfer._make, transfers)), frees)


@dataclass(frozen=True)
class MoveWeightsCommand:
    """Bring version `version` of a role from one instance's storage into another's (reallocate).

    `devices[rank]` is where a rank is, so that what is near is asked first; empty: all are equally near.
    """

    source: ModelInstance
    target: ModelInstance
    version: int
    source_layout: Layout
    target_layout: Layout
    devices: tuple[Device, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measurements(Generic[Bytes]):
    """Time, data and memory of one piece of work: of one rank, or of all ranks of a node (memory then by rank).

    `seconds` is the rank's own clock. `bytes_moved` came from other ranks (for offload and reload: to or from the
    host); `peak_extra_bytes` is the most that was staged for it.

    `device_bytes` are the storages of all tensors that engines have on the device; `resident_bytes` is what the system
    says of the process's own memory, their witness where the device is a CPU; `store_bytes` are the rows still kept.
    """

    seconds: float
    fingerprint_seconds: float = 0.0
    bytes_moved: int = 0
    num_tokens: int = 0
    peak_extra_bytes: int = 0
    device_bytes: Bytes
    resident_bytes: Bytes
    store_bytes: Bytes
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankReport(Measurements[int]):
    """A rank's reply to a command. `digest` is set when weights were written.

    `row_lengths` are the tokens of each row that a generate made, in the order of its rows. `state` is what a stateful
    computation leaves for the next step, as a checkpoint holds it, or why none can. `chosen_rows` are the numbers of
    those that a call chose.
    """

    digest: Digest | None = None
    row_lengths: tuple[int, ...] = ()
    chosen_rows: tuple[int, ...] = ()
    state: Mapping[str, Any] | InvalidInput | None = None
