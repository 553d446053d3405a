"""Finds the files and format of a dataset's path: a file, a folder, a saved `datasets` folder, or a pattern."""

from collections.abc import Mapping
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any, Literal

from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.files.foreign_file import read_json, refuse_pointer, require_regular
from prefect_rlhf.files.path_text import checked_path
from prefect_rlhf.files.storage.inputs import dataset_on_hub, dataset_path
from prefect_rlhf.tasks.data.stored.compressed import uncompressed
from prefect_rlhf.tasks.data.stored.split_files import of_split, shards

StoredAs = Literal["parquet", "json", "delimited", "saved"]
FORMATS: Mapping[str, StoredAs] = {
    ".parquet": "parquet",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "delimited",
    ".tsv": "delimited",
}
PLACES = "an existing file of Parquet, JSON or CSV, a folder of such files or of datasets.save_to_disk, or a pattern"


@dataclass(frozen=True, slots=True)
class Files:
    """Files of one format, in the order of their rows. `split` is their split if folders or names are splits."""

    format: StoredAs
    files: tuple[str, ...]
    folder: str | None = None
    split: str | None = None


def find_files(field: str, path: str, split: str) -> Files:
    """Return the files of a path.

    Raises InvalidInput, at `field`.path or `field`.split, if no file exists, and for a Git LFS pointer in place of a
    file.
    """
    found = _find(field, path, split)
    for file in found.files:
        refuse_pointer(f"{field}.path", Path(file))
    return found


def _find(field: str, path: str, split: str) -> Files:
    at = f"{field}.path"
    given, path = path, dataset_path(path, at)
    place = checked_path(at, path)
    if place.is_dir():
        return _in_folder(field, place, split)
    if place.exists():
        try:
            require_regular(place)
        except OSError as error:
            raise InvalidInput(at, str(place), f"{PLACES} ({error.strerror})") from error
        return Files(_format_of(place), (path,))
    if not has_magic(path):
        on_hub = dataset_on_hub(given, at)
        raise InvalidInput(at, given, PLACES if on_hub is None else f"{PLACES}; on the Hub: {on_hub}")
    files = tuple(sorted(file for file in glob(path, recursive=True) if Path(file).is_file()))  # noqa: PTH207  path may be absolute
    if not files:
        raise InvalidInput(at, given, "a pattern that matches a file")
    formats = {_format_of(Path(file)): file for file in files}
    if len(formats) > 1:
        raise InvalidInput(at, given, f"a pattern of files of the same format, unlike {' and '.join(formats.values())}")
    return Files(next(iter(formats)), files)


def _in_folder(field: str, folder: Path, split: str) -> Files:
    if (folder / "dataset_dict.json").is_file():
        splits = _entry(field, folder / "dataset_dict.json", "splits")
        if split not in splits:
            raise InvalidInput(f"{field}.split", split, f"a split of {folder}: {', '.join(map(str, splits))}")
        return Files("saved", _saved_files(field, folder / split), split=split)
    if (folder / "state.json").is_file():
        return Files("saved", _saved_files(field, folder))
    below = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file())
    visible = (file for file in below if not any(part.startswith((".", "_")) for part in file.parts))  # as for Arrow
    files = [folder / file for file in visible]
    if not files:
        raise InvalidInput(f"{field}.path", str(folder), "a folder with files of Parquet, JSON or CSV")
    formats = {FORMATS.get(uncompressed(file).suffix) for file in files}
    only = formats.pop() if len(formats) == 1 else None
    if only is not None and (some := of_split(field, files, folder, split)) is not None:
        return Files(only, some, split=split)
    if only is not None and only != "parquet":
        return Files(only, tuple(map(str, files)))
    other = next((file for file in files if file.suffix != ".parquet"), None)
    if other is not None:
        patterns = (file.parent / shards(file) for file in files if file.suffix == ".parquet")
        pattern = next(patterns, folder / "*.parquet")
        expected = f"a folder with only .parquet files, or a pattern such as {pattern}"
        raise InvalidInput(f"{field}.path", str(other), expected)
    return Files("parquet", tuple(map(str, files)), folder=str(folder))


def _saved_files(field: str, folder: Path) -> tuple[str, ...]:
    """Return the Arrow files that state.json names."""
    entries = _entry(field, folder / "state.json", "_data_files")
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        expected = "the name of each of its _data_files, in the same folder"
        raise InvalidInput(f"{field}.path", str(folder / "state.json"), expected)
    return tuple(str(folder / entry["filename"]) for entry in entries)


def _entry(field: str, file: Path, key: str) -> list[Any]:
    """Return the list under a key of a JSON file."""
    expected = f"a file from datasets.save_to_disk, with {key}"
    with refusing((OSError, ValueError), f"{field}.path", str(file), expected):
        content = read_json(file)
    if not isinstance(content, dict) or not isinstance(content.get(key), list):
        raise InvalidInput(f"{field}.path", str(file), expected)
    found: list[Any] = content[key]
    return found


def _format_of(file: Path) -> StoredAs:
    """Return the format that a file's suffix indicates, Parquet by default."""
    return FORMATS.get(uncompressed(file).suffix, "parquet")
