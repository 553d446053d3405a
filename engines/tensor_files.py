"""The safetensors files of a checkpoint folder: what they hold (headers alone), slices of tensors, and writing them.

Importable without torch; tensors are made only where they are read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout import Region

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
FORMATS = {"float32": "F32", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is stored, and its shape."""

    file: Path
    shape: tuple[int, ...]


def stored_tensors(folder: Path, field: str) -> dict[str, StoredTensor]:
    """Read the headers of all safetensors files in `folder`. Raises InvalidInput naming a missing or corrupt file."""
    found: dict[str, StoredTensor] = {}
    for file in _files(folder, field):
        header, data_bytes = _read_header(file, field)
        for name, entry in header.items():
            if entry["data_offsets"][1] > data_bytes:
                raise InvalidInput(field, file.name, f"a whole file; it ends inside tensor {name}")
            if entry["dtype"] not in ITEM_BYTES:
                raise InvalidInput(field, f"{name} of type {entry['dtype']}", "a tensor of type F32, BF16 or F16")
            found[name] = StoredTensor(file, tuple(entry["shape"]))
    return found


class OpenTensors:
    """A checkpoint folder opened for reading slices.

    >>> with OpenTensors(path, "actor.path") as tensors:  # doctest: +SKIP
    ...     tensors.read("model.norm.weight", ((0, 64),))
    """

    def __init__(self, folder: str, field: str) -> None:
        self._tensors = stored_tensors(Path(folder), field)
        self._field = field
        self._opened: dict[Path, Any] = {}

    def __enter__(self) -> OpenTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, region: Region) -> Tensor:
        """The part `region` of a tensor, on the CPU, in the stored format. Only its bytes are read."""
        if name not in self._tensors:
            raise InvalidInput(self._field, f"no tensor {name}", "a checkpoint that holds it")
        file = self._tensors[name].file
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        part: Tensor = self._opened[file].get_slice(name)[tuple(slice(*span) for span in region)]
        return part


def write_tensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: str, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write tensors one by one, in any order, to one safetensors file; `shapes` says which will come.

    Raises ValueError when a tensor is missing or has another shape.
    """
    offsets, end = {}, 0
    for name, shape in shapes.items():
        offsets[name] = (end, end := end + _num_elements(shape) * ITEM_BYTES[FORMATS[dtype]])
    missing = set(shapes)
    with file.open("wb") as out:
        data_start = _write_header(out, shapes, dtype, offsets)
        out.truncate(data_start + end)
        for name, tensor in tensors:
            if tuple(tensor.shape) != shapes.get(name):
                raise ValueError(f"tensor {name}: got shape {tuple(tensor.shape)}, expected {shapes.get(name)}")
            out.seek(data_start + offsets[name][0])
            out.write(_bytes_of(tensor, dtype))
            missing.discard(name)
    if missing:
        raise ValueError(f"no tensor came for {sorted(missing)[0]}")


def _files(folder: Path, field: str) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise InvalidInput(field, INDEX, "a JSON object with a weight_map") from error
    else:
        names = [SINGLE]
    for name in names:
        if not (folder / name).is_file():
            raise InvalidInput(field, f"no file {name} in {folder}", "a folder that holds its safetensors files")
    return [folder / name for name in names]


def _read_header(file: Path, field: str) -> tuple[dict[str, Any], int]:
    """Tensor entries of one file, and how many bytes of data follow them."""
    size = file.stat().st_size
    with file.open("rb") as stored:
        start = stored.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise InvalidInput(field, file.name, "a safetensors file; this one is cut short or of another format")
        try:
            header: dict[str, Any] = json.loads(stored.read(length))
        except ValueError as error:
            raise InvalidInput(field, file.name, "a safetensors file; its header is not JSON") from error
    header.pop("__metadata__", None)
    return header, size - 8 - length


def _write_header(
    out: Any, shapes: Mapping[str, tuple[int, ...]], dtype: str, offsets: Mapping[str, tuple[int, int]]
) -> int:
    """Write the header; return where the data starts."""
    entries: dict[str, Any] = {
        name: {"dtype": FORMATS[dtype], "shape": list(shape), "data_offsets": list(offsets[name])}
        for name, shape in shapes.items()
    }
    text = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    text += b" " * (-len(text) % 8)  # readers want aligned data
    out.write(struct.pack("<Q", len(text)) + text)
    return 8 + len(text)


def _bytes_of(tensor: Tensor, dtype: str) -> bytes:
    import torch  # only here: reading headers must not need it

    wanted = torch.float32 if dtype == "float32" else torch.bfloat16
    raw: bytes = tensor.detach().cpu().to(wanted).contiguous().view(torch.uint8).numpy().tobytes()
    return raw


def _num_elements(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
