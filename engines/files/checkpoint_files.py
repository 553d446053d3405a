"""A checkpoint's shard files: a file per rank and set of weights, with regions of main weights and moments.

A shard is a safetensors file with tensors named like `exp_avg model.norm.weight [0:64]`. A JSON index next to it holds
a checksum of each tensor. The controller reads indexes, the ranks read tensors.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from prefect_rlhf.engines.engine import StatePart
from prefect_rlhf.engines.files.tensor_files import write_tensors
from prefect_rlhf.engines.weights.views import within
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import flush_to_disk, writing
from prefect_rlhf.files.foreign_file import read_json
from prefect_rlhf.placement.layout.regions import Region, intersection, num_elements, shape_of

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = "a shard as it was written; an earlier checkpoint may be intact"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A parameter's region on disk. `kind` is `main`, `exp_avg` or `exp_avg_sq`."""

    file: Path
    kind: str
    parameter: str
    region: Region
    checksum: str

    @property
    def key(self) -> str:
        return part_key(self.kind, self.parameter, self.region)


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The content of a shard file. `num_updates` counts the optimizer's steps so far."""

    file: Path
    num_updates: int
    num_bytes: int
    parts: tuple[StoredPart, ...]


def part_key(kind: str, parameter: str, region: Region) -> str:
    """Return a tensor's name in a shard file.

    >>> part_key("main", "model.norm.weight", ((0, 64),))
    'main model.norm.weight [0:64]'
    """
    return f"{kind} {parameter} [{','.join(f'{start}:{stop}' for start, stop in region)}]"


def write_shard(folder: Path, number: int, num_updates: int, parts: Iterable[StatePart]) -> Path:
    """Write a shard and its index, through to the disk; return the shard's file. The parts are in host memory.

    Raises OutputFailed, which names the file, if the disk is full.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"shard-{number:05d}.safetensors"
    by_key = {part_key(part.kind, part.parameter, part.region): part for part in parts}
    shapes = {key: shape_of(part.region) for key, part in by_key.items()}
    checksums: dict[str, str] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for key, part in by_key.items():
            values = part.values.view(shapes[key])
            checksums[key] = checksum(values)
            yield key, values

    with writing(file):
        write_tensors(file, shapes, "float32", tensors())
        flush_to_disk(file)
    content = {"num_updates": num_updates, "num_bytes": file.stat().st_size, "checksums": checksums}
    write_json(file.with_suffix(".json"), content)
    return file


def read_index(index: Path, weights: str) -> ShardIndex:
    """Read a shard's index. Its file must exist with the recorded length. Raises InvalidInput otherwise."""
    file = index.with_suffix(".safetensors")
    field = f"checkpoint.{weights}"
    try:
        content = read_json(index)
        parts = tuple(_parse(file, key, value) for key, value in content["checksums"].items())
        shard = ShardIndex(file, content["num_updates"], content["num_bytes"], parts)
    except OSError as error:
        raise InvalidInput(field, f"no file {index}", WHOLE) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(field, f"{index}, which is not an index", WHOLE) from error
    if not file.is_file():
        raise InvalidInput(field, f"no file {file} (of {_some(shard.parts)})", WHOLE)
    if file.stat().st_size != shard.num_bytes:
        seen = f"{file} of {file.stat().st_size} bytes (of {_some(shard.parts)})"
        raise InvalidInput(field, seen, f"{shard.num_bytes} bytes, {WHOLE}")
    return shard


def check_coverage(weights: str, indexes: Sequence[ShardIndex], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise InvalidInput unless the shards hold every element of every parameter exactly once, after the same step."""
    field = f"checkpoint.{weights}"
    updates = sorted({index.num_updates for index in indexes})
    if len(updates) != 1:
        raise InvalidInput(field, f"shards after {updates} optimizer steps", "shards of the same step")
    held: dict[tuple[str, str], int] = defaultdict(int)
    for part in (part for index in indexes for part in index.parts):
        held[part.kind, part.parameter] += num_elements(part.region)
    for kind in ("main", "exp_avg", "exp_avg_sq") if updates[0] else ("main",):
        for name, shape in shapes.items():
            expected = num_elements(tuple((0, size) for size in shape))
            if held[kind, name] != expected:
                raise InvalidInput(
                    field, f"{held[kind, name]} elements of {kind} {name}", f"the {expected} of its shape"
                )


def check_shard(index: Path, weights: str) -> int:
    """Compare every tensor of a shard with its checksum; return the bytes read.

    Raises InvalidInput at the first difference.
    """
    shard = read_index(index, weights)
    try:
        with safe_open(shard.file, framework="pt") as stored:
            for part in shard.parts:
                if checksum(stored.get_tensor(part.key)) != part.checksum:
                    raise InvalidInput(f"checkpoint.{weights}", f"other content of {part.key} in {shard.file}", WHOLE)
    except SafetensorError as error:
        seen = f"{shard.file}, which does not open (of {_some(shard.parts)}; {error})"
        raise InvalidInput(f"checkpoint.{weights}", seen, WHOLE) from error
    return shard.num_bytes


class StoredState:
    """All shards of a model's trained weights, a folder each. It can read any region of any parameter."""

    def __init__(self, *folders: Path) -> None:
        self._names = " and ".join(folder.name for folder in folders)
        self._opened: dict[Path, Any] = {}
        indexes = [read_index(index, folder.name) for folder in folders for index in shard_indexes(folder)]
        self.num_updates = max((index.num_updates for index in indexes), default=0)
        self._parts: dict[tuple[str, str], list[StoredPart]] = defaultdict(list)
        for part in (part for index in indexes for part in index.parts):
            self._parts[part.kind, part.parameter].append(part)

    def read(self, kind: str, parameter: str, region: Region) -> Tensor:
        """Read a region in float32 on the CPU from all shards that hold a part of it; read no other bytes.

        Raises InvalidInput if the shards lack elements.
        """
        import torch  # only here: the controller reads indexes, a dry run without torch, too

        whole, filled = torch.empty(shape_of(region)), 0
        for part in self._parts[kind, parameter]:
            common = intersection(part.region, region)
            if common is not None:
                whole[within(common, region)] = self._slice(part, common)
                filled += num_elements(common)
        if filled != num_elements(region):
            seen = f"{filled} of {num_elements(region)} elements of {kind} {parameter}"
            raise InvalidInput(f"checkpoint.{self._names}", seen, "all elements")
        return whole

    def _slice(self, part: StoredPart, region: Region) -> Tensor:
        if part.file not in self._opened:
            self._opened[part.file] = safe_open(part.file, framework="pt")
        values: Tensor = self._opened[part.file].get_slice(part.key)[within(region, part.region)]
        return values


def shard_indexes(folder: Path) -> list[Path]:
    """Return the index files in a weight set's folder."""
    return sorted(folder.glob("shard-*.json"))


def checksum(values: Tensor) -> str:
    """Hash the bytes of a contiguous CPU tensor that no engine owns, because numpy prevents resizing its storage."""
    return blake2b(values.contiguous().numpy().data, digest_size=8).hexdigest()


def write_json(file: Path, content: object) -> None:
    """Write through to the disk. Raises OutputFailed, which names the file, if the disk is full."""
    with writing(file):
        file.write_text(json.dumps(content, indent=1) + "\n")
        flush_to_disk(file)


def _parse(file: Path, key: str, value: str) -> StoredPart:
    kind, parameter, spans = key.split(" ")
    pairs = (span.split(":") for span in spans.strip("[]").split(","))
    return StoredPart(file, kind, parameter, tuple((int(start), int(stop)) for start, stop in pairs), value)


def _some(parts: Sequence[StoredPart]) -> str:
    """Return a short list of the parameters that are lost with a file."""
    names = list(dict.fromkeys(part.parameter for part in parts))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else "no parameter"
