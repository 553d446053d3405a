"""Measured layer times as a value: `rlhf/profile` writes it, and the cost model reads it instead of a datasheet.

As in ReaL (section 5.1), single layers are measured at sizes in powers of two, and times in between are interpolated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from pydantic import ConfigDict, TypeAdapter

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.wrong_setting import refusing_invalid
from prefect_rlhf.files.foreign_file import read_content
from prefect_rlhf.placement.cost.contention import SharedWork, SlowDown
from prefect_rlhf.placement.cost.datasheets.collectives import CollectiveGroup, all_reduce_seconds, replicas_seconds
from prefect_rlhf.placement.cost.datasheets.hardware import Links
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DEQUANTIZED_BYTES
from prefect_rlhf.placement.cost.workload import ModelCallKind
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.model import Dtype, TransformerShape
from prefect_rlhf.placement.plan import EngineKind

ModelPiece = Literal[
    "forward", "backward", "head_forward", "head_backward", "decode", "decode_graphs", "sample", "all_reduce", "share"
]
"""A timed piece, see LayerTimes. `decode_graphs` is `decode` with CUDA graphs; a piece without a length has
length 1."""
_MESSAGES: tuple[ModelPiece, ...] = ("all_reduce", "share")  # the same for every engine


@dataclass(frozen=True, slots=True)
class Measurement:
    """Median `seconds` of a piece for `rows` of `length` tokens (decode: of context), as a single part of `tp`.

    Times are per layer and device, without communication. For head pieces `rows` counts tokens; for messages (over `tp`
    ranks) it counts bytes of an all_reduce, or parameters of a share. vLLM's `forward` is its prefill.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    piece: ModelPiece
    tp: int
    rows: int
    length: int
    seconds: float
    engine: EngineKind = "megatron"


@dataclass(frozen=True, slots=True)
class Subject:
    """A profile's subject: a shape and format, on `num_devices` devices of a kind, by the cost model's name.

    With `num_nodes` above 1, each node has that number of devices, and the network between nodes is measured too.
    """

    shape: TransformerShape
    dtype: Dtype
    kind: Backend
    device: str
    num_devices: int
    processor: str
    versions: tuple[tuple[str, str], ...]
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """Measurements of a model's layers on a kind of device, and of the links between devices."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    shape: TransformerShape
    dtype: Dtype
    device: str
    versions: tuple[tuple[str, str], ...]
    """The software packages that the times depend on, with their versions."""
    measurements: tuple[Measurement, ...]
    links: Links
    """The links between devices, and the network between nodes."""
    adam_seconds: float
    """Per parameter: an optimizer step."""
    call_seconds: tuple[tuple[ModelCallKind, EngineKind, float], ...] = ()
    """The fixed part of a call of each kind in each engine."""
    written_seconds: float = 0.0
    """Per parameter: a fingerprint."""
    packed_seconds: float = 0.0
    """Per parameter: vLLM's packing, if it packs."""
    processor: str = ""
    """The machine's processor, if that is the device."""
    num_devices: int = 1
    """How many devices worked at once on each node, because they share memory and links."""
    slow_downs: tuple[SlowDown, ...] = ()
    """The seconds of the same work with fewer busy devices; without them it takes as long."""
    num_nodes: int = 1
    busy: float = 0.0
    """The share of the cores that other programs had, from 0 to 1."""

    def slow_down(self, work: SharedWork, engine: EngineKind) -> SlowDown | None:
        """Return the measured slow-down of a kind of work; None if not measured."""
        return next((one for one in self.slow_downs if (one.work, one.engine) == (work, engine)), None)

    def to_json(self) -> str:
        """Return it as JSON, readable."""
        return _ADAPTER.dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str | bytes, field: str = "profile") -> Profile:
        """Read the output of `to_json`. Raises a one-line InvalidInput for any other text."""
        with refusing_invalid(field, "a profile as rlhf/profile writes it"):
            return _ADAPTER.validate_json(text)

    @classmethod
    def read(cls, path: Path) -> Profile:
        """Read a profile from a file. Raises a one-line InvalidInput for a missing or malformed file."""
        try:
            return cls.from_json(read_content(path), str(path))
        except OSError as error:
            raise InvalidInput(str(path), error.strerror, "a readable profile") from error

    def check(
        self,
        shape: TransformerShape,
        dtype: Dtype,
        device: str,
        versions: Mapping[str, str],
        processor: str | None = None,
        num_devices: int | None = None,
        num_nodes: int | None = None,
    ) -> Profile:
        """Return the profile, or raise InvalidInput if hardware or software differ. `versions` are the installed
        versions.

        `processor`, `num_devices` and `num_nodes` describe the run, if there is a run.
        """
        for field, seen, right in (
            ("profile.device", self.device, device),
            ("profile.processor", self.processor, self.processor if processor is None else processor),
            ("profile.num_devices", self.num_devices, self.num_devices if num_devices is None else num_devices),
            ("profile.num_nodes", self.num_nodes, self.num_nodes if num_nodes is None else num_nodes),
            ("profile.dtype", self.dtype, dtype),
            ("profile.shape", _brief(self.shape), _brief(shape)),
            *((f"profile.versions.{name}", seen, versions.get(name, "none")) for name, seen in self.versions),
        ):
            if seen != right:
                raise InvalidInput(field, seen, f"{right}, which this run has: run rlhf/profile again")
        if self.num_devices > 1 and not self.slow_downs:
            right = "a newer profile, which also has times with fewer devices busy: run rlhf/profile again"
            raise InvalidInput("profile.slow_downs", "none", right)
        if self.shape != shape:
            raise InvalidInput("profile.shape", self.shape, f"{shape}: run rlhf/profile again")
        return self


_ADAPTER: TypeAdapter[Profile] = TypeAdapter(Profile)


def _brief(shape: TransformerShape) -> str:
    return f"{shape.num_layers} layers of {shape.hidden_size}, feed-forward {shape.intermediate_size}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds on a grid of `rows` and `lengths`, both ascending, stored row by row.

    >>> grid = Grid.of([(1, 64, 1.0), (1, 128, 2.0), (2, 64, 1.5), (2, 128, 3.0)])
    >>> grid.at(1.5, 96), grid.at(1, 64), grid.at(0.5, 64), grid.at(4, 64)
    (1.875, 1.0, 1.0, 2.5)
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, points: Sequence[tuple[int, int, float]], field: str = "profile.measurements") -> Grid:
        """Build from (rows, length, seconds). Raises InvalidInput unless every number of rows has every length,
        once.
        """
        by_size = {(rows, length): seconds for rows, length, seconds in points}
        rows = tuple(sorted({row for row, _ in by_size}))
        lengths = tuple(sorted({length for _, length in by_size}))
        if not points or len(points) != len(rows) * len(lengths) or len(by_size) != len(points):
            raise InvalidInput(
                field, f"{len(points)} points", f"each of {len(rows)} rows x {len(lengths)} lengths once"
            )
        return cls(rows, lengths, tuple(tuple(by_size[row, length] for length in lengths) for row in rows))

    def at(self, rows: float, length: float) -> float:
        """Interpolate between sizes, and extrapolate beyond the largest; below the smallest, return the smallest size's
        time.
        """
        first, second, share = _between(self.rows, rows)
        low, high, part = _between(self.lengths, length)
        below = self.seconds[first][low] * (1 - part) + self.seconds[first][high] * part
        above = self.seconds[second][low] * (1 - part) + self.seconds[second][high] * part
        return max(0.0, below * (1 - share) + above * share)


def _between(sizes: Sequence[int], size: float) -> tuple[int, int, float]:
    """Return (index below, index above, share of the way between them); more than 1 beyond the largest."""
    if len(sizes) == 1 or size <= sizes[0]:
        return 0, 0, 0.0
    above = min(bisect_right(sizes, size), len(sizes) - 1)
    return above - 1, above, (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])


@final
class ProfiledTimes:
    """Implements LayerTimes from a profile: all of a measured piece's time counts as compute."""

    def __init__(self, profile: Profile, sizes: ModelSizes, engine: EngineKind = "megatron") -> None:
        """`sizes` describe a model of the profile's shape, with either head; `engine` runs its calls."""
        self.sizes, self.links = sizes, profile.links
        self._engine, self._adam_seconds = engine, profile.adam_seconds
        self._call_seconds = {kind: seconds for kind, of, seconds in profile.call_seconds if of == engine}
        self._written_seconds = profile.written_seconds
        self._packed_seconds = profile.packed_seconds if TRAITS[engine].packs_weights else 0.0
        points: dict[tuple[ModelPiece, int], list[tuple[int, int, float]]] = {}
        for measured in profile.measurements:
            if measured.engine == engine or measured.piece in _MESSAGES:
                point = measured.rows, measured.length, measured.seconds
                points.setdefault((measured.piece, measured.tp), []).append(point)
        self._grids = {key: Grid.of(some, f"profile.{engine}.{key[0]}.tp{key[1]}") for key, some in points.items()}

    def fixed(self, kind: ModelCallKind) -> float:
        return self._call_seconds.get(kind, 0.0)

    def forward(self, rows: float, length: float, tp: int, split: int = 1, ep: int = 1) -> Seconds:
        """See LayerTimes. Raises InvalidInput for ep, which the measured engines do not have.

        The measured layers do not divide tokens between products, so a split is ignored; the estimate is at most too
        slow.
        """
        _check_no_experts(ep)
        return self._with_adapter(self._at("forward", tp, rows, length), tp)

    def backward(self, rows: float, length: float, tp: int, split: int = 1, ep: int = 1) -> Seconds:
        """See LayerTimes and `_backward`."""
        _check_no_experts(ep)
        return self._with_adapter(self._backward("backward", "forward", tp, rows, length), tp)

    def head_forward(self, tokens: float, tp: int) -> Seconds:
        return Seconds() if self.sizes.head == "scalar" else self._at("head_forward", tp, tokens, 1)

    def head_backward(self, tokens: float, tp: int) -> Seconds:
        return (
            Seconds() if self.sizes.head == "scalar" else self._backward("head_backward", "head_forward", tp, tokens, 1)
        )

    def decode(self, rows: float, context: float, tp: int, cuda_graphs: bool, ep: int = 1) -> Seconds:
        """See LayerTimes and `forward`. If only graph or only eager decoding was measured, return that time: GPUs run
        with graphs, and CPUs have no graphs.
        """
        _check_no_experts(ep)
        eager, replayed = ((piece, tp) in self._grids for piece in ("decode", "decode_graphs"))
        graphs = replayed and (cuda_graphs or not eager)
        return self._with_adapter(self._at("decode_graphs" if graphs else "decode", tp, rows, context), tp)

    def sample(self, rows: float, tp: int) -> Seconds:
        return self._at("sample", tp, rows, 1)

    def exchange(self) -> float:
        """See LayerTimes: zero, because the measured latency of a message includes it."""
        return 0.0

    def adam(self, num_parameters: float) -> float:
        return num_parameters * self._adam_seconds

    def written(self, num_parameters: float) -> float:
        return num_parameters * self._written_seconds

    def packed(self, num_parameters: float) -> float:
        return num_parameters * self._packed_seconds

    def taken(self, num_layers: int) -> float:
        """See LayerTimes: zero, because a profile measures moves of whole weights."""
        return 0.0

    def host_step(self, rows: float) -> float:
        """See LayerTimes: zero, because measured sampling lasts until the next step begins."""
        return 0.0

    def all_reduce(self, num_bytes: float, group: CollectiveGroup) -> float:
        """See LayerTimes; by bandwidth if no group of that size was measured."""
        grid = self._measured("all_reduce", group)
        return all_reduce_seconds(num_bytes, group, self.links) if grid is None else grid.at(num_bytes, 1)

    def share(self, num_parameters: float, group: CollectiveGroup) -> float:
        """See LayerTimes; by bandwidth if no group of that size was measured."""
        grid = self._measured("share", group)
        if grid is None:
            return replicas_seconds(num_parameters, self.sizes.item, group, self.links)
        return grid.at(num_parameters, 1)

    def _backward(self, piece: ModelPiece, forward: ModelPiece, tp: int, rows: float, length: float) -> Seconds:
        """The time of a backward. No profile measures a backward without gradients of weights, as of an adapter's base.

        They take no longer than the forward, and no longer than half of the backward, which has as many products for
        gradients of inputs: the estimate leaves out the shorter of both.
        """
        whole = self._at(piece, tp, rows, length)
        if self.sizes.adapter is None:
            return whole
        return Seconds(compute=max(whole.total - self._at(forward, tp, rows, length).total, whole.total / 2))

    def _with_adapter(self, layer: Seconds, tp: int) -> Seconds:
        """The time of a layer with the adapter, which no profile measures: longer by its share of the elements.

        A base in four bits is dequantised first, by the bandwidth of memory.
        """
        if self.sizes.base_dtype is not None:
            moved = self.sizes.on(tp).matrices / tp * (DEQUANTIZED_BYTES + self.sizes.item)
            layer = layer + Seconds(memory_traffic=moved / self.links.device)
        if self.sizes.adapter is None:
            return layer
        return layer.times(1 + self.sizes.layer_adapter(tp) * tp / self.sizes.on(tp).layer_products)

    def _measured(self, piece: ModelPiece, group: CollectiveGroup) -> Grid | None:
        """Return the grid of a message; they are measured within a node."""
        return self._grids.get((piece, group.size)) if group.span == "node" else None

    def _at(self, piece: ModelPiece, tp: int, rows: float, length: float) -> Seconds:
        grid = self._grids.get((piece, tp))
        if grid is None:
            has = sorted(measured for name, measured in self._grids if name == piece)
            raise InvalidInput(
                f"profile.{self._engine}.{piece}", f"tp {has}", f"measurements with tp {tp}: run rlhf/profile with it"
            )
        return Seconds(compute=grid.at(rows, length))


def _check_no_experts(ep: int) -> None:
    if ep > 1:
        raise InvalidInput("expert parallelism", f"ep {ep}", "ep 1: no profile measures experts")
