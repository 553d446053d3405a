"""A checkpoint folder's safetensors files: reads headers, reads slices of tensors, and writes files.

Importable without torch; only reading makes tensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from prefect_rlhf.engines.files.other_folders import without_safetensors
from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.files.foreign_file import parse_json, read_json, refuse_pointer
from prefect_rlhf.files.model_folder import APART
from prefect_rlhf.placement.layout.regions import Region

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FORMAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
FORMATS = {"float32": "F32", "bfloat16": "BF16"}
_COMPARED_AT_ONCE = 1 << 24
MAX_FILE_BYTES = 5 * 10**9  # the limit of most models on the Hub


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored tensor's file, shape, and byte range."""

    file: Path
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def stored_tensors(folder: Path, field: str, files: Collection[str] = ()) -> dict[str, StoredTensor]:
    """Read the headers of all of a model's safetensors files in `folder`, or only of `files`.

    Raises InvalidInput naming a missing or corrupt file.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in [folder / name for name in files] or _files(folder, field):
        header, data_bytes = _read_header(file, field)
        for name, entry in header.items():
            tensors[name] = _stored_tensor(file, field, name, entry, data_bytes)
        expected = "a safetensors file that its library opens"  # it refuses bytes of no tensor, as two downloads leave
        with refusing(SafetensorError, field, file.name, expected), safe_open(file, framework="numpy"):
            pass
    return tensors


def _stored_tensor(file: Path, field: str, name: str, entry: Any, data_bytes: int) -> StoredTensor:
    """Return the header's entry of a tensor. Raises InvalidInput if the file is too short for its bytes."""
    expected = f"a safetensors file; its header of tensor {name} is invalid"
    with refusing((TypeError, ValueError, KeyError), field, file.name, expected, most=0):
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), entry["data_offsets"]
        length = int(end) - int(begin)
    if begin < 0 or end > data_bytes:
        raise InvalidInput(field, file.name, f"a whole file; it ends inside tensor {name}")
    if dtype not in FORMAT_BYTES:
        raise InvalidInput(field, f"{name} of type {dtype}", "a tensor of type F32, BF16 or F16")
    if length != prod(shape) * FORMAT_BYTES[dtype]:
        raise InvalidInput(
            field, f"{name} of shape {shape} in {length} bytes of {file.name}", "as many bytes as the shape needs"
        )
    return StoredTensor(file, shape, file.stat().st_size - data_bytes + begin, length)


def equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors are equal bit for bit."""
    if (one.shape, one.num_bytes) != (other.shape, other.num_bytes):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for passed in range(0, one.num_bytes, _COMPARED_AT_ONCE):
            size = min(_COMPARED_AT_ONCE, one.num_bytes - passed)
            if left.read(size) != right.read(size):
                return False
    return True


class OpenTensors:
    """A checkpoint folder, or some `files` of it, opened for reading slices; stored names begin with `prefix`.

    >>> with OpenTensors(path, "actor.path") as tensors:  # doctest: +SKIP
    ...     tensors.read("model.norm.weight", ((0, 64),))
    """

    def __init__(self, folder: str, field: str, files: Collection[str] = (), prefix: str = "") -> None:
        stored = stored_tensors(Path(folder), field, files)
        self._names = {name.removeprefix(prefix): name for name in stored}
        self._tensors = {name: stored[own] for name, own in self._names.items()}
        self._field = field
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> OpenTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, region: Region) -> Tensor:
        """Read the part `region` of a tensor, on the CPU, in the stored format; only its bytes are read.

        Raises InvalidInput for a missing tensor, and for a tensor with NaN or infinite values.
        """
        if name not in self._tensors:
            raise InvalidInput(self._field, f"no tensor {name}", "a checkpoint that holds it")
        file = self._tensors[name].file
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        part: Tensor = self._opened[file].get_slice(self._names[name])[tuple(slice(*span) for span in region)]
        if not _is_finite(part):
            raise InvalidInput(self._field, f"{name} with NaN or infinite values in {file}", "weights that are finite")
        return part


def _is_finite(part: Tensor) -> bool:
    """Return whether no value is NaN or infinite, in one pass without a copy: a NaN is its own least and greatest.

    `isfinite().all()` takes twenty times as long for bfloat16, and was most of the time to load a model.
    """
    return part.numel() == 0 or all(bool(end.isfinite()) for end in part.aminmax())


def write_tensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write tensors, in any order, to a single safetensors file; `shapes` lists them.

    Raises ValueError if a tensor is missing or has another shape.
    """
    _write({file: shapes}, dtype, tensors)


def write_folder_of_tensors(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    tensors: Iterable[tuple[str, Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
    apart: Collection[str] = (),
) -> None:
    """Like `write_tensors`, into a single file, or several of at most `max_file_bytes` bytes with an index.

    Tensors named in `apart` go to a file that the index does not name.
    """
    plain = {name: shape for name, shape in shapes.items() if name not in apart}
    parts = _parts(plain, dtype, max_file_bytes)
    if len(parts) == 1 and not apart:
        write_tensors(folder / SINGLE, shapes, dtype, tensors)
        return
    files = {f"model-{i:05d}-of-{len(parts):05d}.safetensors": part for i, part in enumerate(parts, start=1)}
    beside = {APART: {name: shapes[name] for name in apart}} if apart else {}
    _write({folder / name: part for name, part in (files | beside).items()}, dtype, tensors)
    weight_map = {name: file for file, part in files.items() for name in part}
    total = sum(_num_bytes(shape, dtype) for shape in plain.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))


def _parts(shapes: Mapping[str, tuple[int, ...]], dtype: str, max_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Split the tensors, in their order, into files of at most `max_bytes`; a larger tensor has a file of its own."""
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for name, shape in shapes.items():
        size = _num_bytes(shape, dtype)
        if parts[-1] and filled + size > max_bytes:
            parts.append({})
            filled = 0
        parts[-1][name] = shape
        filled += size
    return parts


def _write(
    files: Mapping[Path, Mapping[str, tuple[int, ...]]], dtype: str, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Reserve room for all tensors in all files, then write each tensor to its place as it arrives."""
    shapes = {name: shape for part in files.values() for name, shape in part.items()}
    places: dict[str, tuple[Any, int]] = {}
    missing = set(shapes)
    with ExitStack() as stack:
        for file, part in files.items():
            out = stack.enter_context(file.open("wb"))
            places |= {name: (out, offset) for name, offset in _reserve(out, part, dtype).items()}
        for name, tensor in tensors:
            if tuple(tensor.shape) != shapes.get(name):
                raise ValueError(f"tensor {name}: got shape {tuple(tensor.shape)}, expected {shapes.get(name)}")
            out, offset = places[name]
            out.seek(offset)
            out.write(_bytes_of(tensor, dtype))
            missing.discard(name)
    if missing:
        raise ValueError(f"no tensor was passed for {sorted(missing)[0]}")


def _files(folder: Path, field: str) -> list[Path]:
    names = _indexed(folder, field) or [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            expected = f"a folder that holds its safetensors files{without_safetensors(folder)}"
            raise InvalidInput(field, f"no file {name} in {folder}", expected)
    return [folder / name for name in (*names, *((APART,) if (folder / APART).is_file() else ()))]


def _indexed(folder: Path, field: str) -> list[str]:
    """Return the files that a folder's index names; none without an index, and for an index that was left over.

    `save_pretrained` into a folder that has a model leaves the older model's index, or its single file. transformers
    reads the single file then, vLLM the files of the index. Raises InvalidInput if there are both.
    """
    if not (folder / INDEX).is_file():
        return []
    refuse_pointer(field, folder / INDEX)
    unreadable = (OSError, ValueError, KeyError, AttributeError, TypeError)
    with refusing(unreadable, field, INDEX, "a JSON object with a weight_map", most=0):
        names = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InvalidInput(field, name, f"names of files in {folder}, in its {INDEX}")
    if SINGLE in names or not (folder / SINGLE).is_file():
        return names
    if found := [name for name in names if (folder / name).is_file()]:
        seen = f"{SINGLE} and {found[0]} in {folder}"
        right = f"one model: remove {SINGLE} if it is the older one, else {INDEX} and its files"
        raise InvalidInput(field, seen, right)
    return []


def _read_header(file: Path, field: str) -> tuple[dict[str, Any], int]:
    """Read a file's header of tensors, and the number of bytes of data after it."""
    size = file.stat().st_size
    with file.open("rb") as stored:
        start = stored.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            refuse_pointer(field, file)
            raise InvalidInput(field, file.name, "a safetensors file; this file is cut short or of another format")
        with refusing(ValueError, field, file.name, "a safetensors file; its header is not JSON", most=0):
            header: Any = parse_json(stored.read(length))
    if not isinstance(header, dict):
        raise InvalidInput(field, file.name, "a safetensors file; its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, size - 8 - length


def _reserve(out: Any, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> dict[str, int]:
    """Write the header and extend the file to its final length; return the first byte of each tensor."""
    spans, end = {}, 0
    for name, shape in shapes.items():
        spans[name] = (end, end := end + _num_bytes(shape, dtype))
    entries: dict[str, Any] = {
        name: {"dtype": FORMATS[dtype], "shape": list(shape), "data_offsets": list(spans[name])}
        for name, shape in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    text += b" " * (-len(text) % 8)  # readers want aligned data
    out.write(struct.pack("<Q", len(text)) + text)
    data_start = 8 + len(text)
    out.truncate(data_start + end)
    return {name: data_start + first for name, (first, _) in spans.items()}


def _bytes_of(tensor: Tensor, dtype: str) -> memoryview:
    import torch  # only here: reading headers must not need it

    stored = torch.float32 if dtype == "float32" else torch.bfloat16
    raw: memoryview = tensor.detach().cpu().to(stored).contiguous().view(-1).view(torch.uint8).numpy().data
    return raw


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * FORMAT_BYTES[FORMATS[dtype]]
