"""Copies of the Hub's repositories on this machine, in the Hub's own cache, which other programs share.

A copy is of a commit, so it never changes: a file that has arrived is not requested again.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short
from prefect_rlhf.files.hub.hub_path import HubPath
from prefect_rlhf.files.hub.progress import Arrived, Say, bar_class, size
from prefect_rlhf.files.hub.refusals import cache_of_hub, explained
from prefect_rlhf.files.hub.session import asking
from prefect_rlhf.files.model_folder import (
    ADAPTER,
    ADAPTER_TENSORS,
    APART,
    CONFIG,
    TEMPLATE_FILE,
    TEMPLATES,
    TOKENIZER_CONFIG,
)

Part = Literal["config", "tokenizer", "all", "adapter"]
"""Which files of a model are needed: config.json, all but weights, all that a run reads, or an adapter's."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL = (
    *(CONFIG, INDEX, ADAPTER, "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt"),
)
"""The files of a model that are not weights. No code of a repository is among them."""
SMALLEST = ".gitattributes"  # a file of nearly every repository
ROWS = (".parquet", ".jsonl", ".json", ".ndjson")
MOST_SHOWN = 6  # files of a repository, in a message

_log = logging.getLogger(__name__)
_FILES: Mapping[Part, tuple[str, ...]] = {
    "config": (CONFIG,),
    "adapter": (ADAPTER, ADAPTER_TENSORS, APART, TEMPLATE_FILE, TOKENIZER_CONFIG),
}
_read: dict[tuple[Path, HubPath, Part], Path] = {}  # what this process has found whole, by the cache


def in_words() -> str:
    """Return a line about models and datasets by name, without a request: their folder, its free space, and the
    login.
    """
    from huggingface_hub import constants, get_token

    cache = cache_of_hub()
    if constants.HF_HUB_OFFLINE:
        return f"HF_HUB_OFFLINE is set: only models and datasets in {cache} can be read by name"
    login = "with a token" if get_token() else "not private or gated ones, without a token"
    return f"models and datasets by name go to {cache} ({size(_free(cache))} free), {login}"


def at_commit(place: HubPath, field: str, seen: str) -> HubPath:
    """Return the path at the current commit of its branch or tag; without an answer, at the last downloaded commit.

    Raises InvalidInput, at `field` and about the text `seen`, if there is no such repository or revision.
    """
    if place.commit:
        return place
    from huggingface_hub import HfApi

    with asking(), explained(place, field, seen):
        found = HfApi().resolve_revision(place.repo, repo_type=place.kind, revision=place.revision)
    return place.at(found.resolved)


def model_folder(place: HubPath, field: str, seen: str, part: Part = "all", say: Say = _log.warning) -> Path:
    """Return the folder with a model's files. Files that the cache lacks are downloaded first.

    `say` gets a line when weights are downloaded. Raises InvalidInput, at `field` and about the text `seen`.
    """
    place = at_commit(place, field, seen)
    key = cache_of_hub(), place, part
    if key in _read and _read[key].is_dir():  # ranks ask for a tokenizer at every call
        return _read[key]
    small = _below(place, _FILES.get(part, SMALL))
    if part not in _FILES:
        small += [f"{templates}/*.jinja" for templates in _below(place, [TEMPLATES])]
    folder = _fetch(place, field, seen, small, say) / place.inside
    _check_model(place, folder, field, seen, part)
    if part == "all":
        _fetch(place, field, seen, _below(place, [*_weights(place, folder), APART]), say)
    _read[key] = folder
    return folder


def dataset_folder(place: HubPath, field: str, seen: str, patterns: Sequence[str], say: Say = _log.warning) -> Path:
    """Return a repository's folder. Files that match a pattern of `fnmatch` are downloaded first.

    Raises InvalidInput, at `field` and about the text `seen`, if no file does; the error names files that exist.
    """
    there = at_commit(place, field, seen)
    listed = listing(there, field, seen)
    if listed is not None and not any(_matches(name, patterns) for name in listed):
        raise InvalidInput(field, seen, f"a file of the repository: {data_files(place, listed)}")
    return _fetch(there, field, seen, patterns, say)


def listing(place: HubPath, field: str, seen: str) -> dict[str, int] | None:
    """Return each file's size in a repository at a commit; None if the cache has no list and the Hub is away.

    Raises InvalidInput, at `field` and about the text `seen`, if the cache has nothing of the repository either.
    """
    if files_of(place) is None:
        _fetch(place, field, seen, [SMALLEST], _log.warning)  # huggingface_hub keeps the list, which it needs for this
    return files_of(place)


def files_of(place: HubPath) -> dict[str, int] | None:
    """Return each file's size in a repository at a commit; None if it was never listed here."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(place.repo, repo_type=place.kind, revision=place.revision)
    except CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.size for file in tree}


def _fetch(place: HubPath, field: str, seen: str, patterns: Sequence[str], say: Say) -> Path:
    """Return the folder of a commit with all files that match; files that are in the cache are not requested."""
    from huggingface_hub import snapshot_download

    with asking():
        missing = _missing(place, patterns)
        arrived, began = Arrived(f"{field}: {place.repo}", sum(missing.values()), say), time.monotonic()
        _check_room(arrived.total, field, seen)
        if arrived.is_long:
            say(f"{field}: downloads {place.repo} into {cache_of_hub()}: {size(arrived.total)} in {len(missing)} files")

        def how_far() -> str:
            late = ", ".join(_missing(place, patterns))
            return f"; {arrived} had arrived, without all of {late:.120}" if late else ""

        with explained(place, field, seen, how_far), closing(arrived):
            found = snapshot_download(
                place.repo,
                repo_type=place.kind,
                revision=place.revision,
                allow_patterns=list(patterns),
                tqdm_class=bar_class(arrived),
            )
        if arrived.is_long:
            say(f"{field}: downloaded {place.repo} in {time.monotonic() - began:.0f} s")
    return Path(found)


def data_files(place: HubPath, listed: Collection[str]) -> str:
    """Return the paths, as a dataset's parameter takes them, of a repository's files with rows."""
    revision = None if place.commit else place.revision
    found = [str(replace(place, revision=revision, inside=name)) for name in sorted(listed) if name.endswith(ROWS)]
    more = f", and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
    return ", ".join(found[:MOST_SHOWN]) + more or f"{place.page} has no files with {', '.join(ROWS)}"


def _missing(place: HubPath, patterns: Sequence[str]) -> dict[str, int]:
    """Return the size of each file that matches and is not in the cache; empty if the repository was never listed."""
    from huggingface_hub import try_to_load_from_cache

    def is_here(name: str) -> bool:
        found = try_to_load_from_cache(place.repo, name, revision=place.revision, repo_type=place.kind)
        return isinstance(found, str)

    listed = files_of(place) or {}
    return {name: length for name, length in listed.items() if _matches(name, patterns) and not is_here(name)}


def _check_room(needed: int, field: str, seen: str) -> None:
    """Raise InvalidInput unless the cache's disk has room for the files."""
    cache = cache_of_hub()
    free = _free(cache)
    if free < needed:
        expected = f"a disk with room for {size(needed)} more; {cache} has {size(free)} (HF_HOME is another place)"
        raise InvalidInput(field, seen, expected)


def _free(cache: Path) -> int:
    """Return the free bytes on a folder's disk; the folder need not exist."""
    return shutil.disk_usage(next(folder for folder in (cache, *cache.parents) if folder.is_dir())).free


def _check_model(place: HubPath, folder: Path, field: str, seen: str, part: Part) -> None:
    """Raise InvalidInput for a repository that is no model which a role can have."""
    files, first = files_of(place), ADAPTER if part == "adapter" else CONFIG
    if files is None:  # without the Hub, and another program filled the cache
        if not (folder / first).is_file():
            raise InvalidInput(
                field, seen, f"a model that is whole in the Hub's cache; with a network: {place.command}"
            )
        return
    prefix = f"{place.inside}/" if place.inside else ""
    names = {name.removeprefix(prefix) for name in files if name.startswith(prefix)}
    if part == "adapter" and (missing := [name for name in (ADAPTER, ADAPTER_TENSORS) if name not in names]):
        raise InvalidInput(field, seen, f"an adapter (LoRA) with {missing[0]}, which is not among its files")
    if part != "adapter" and CONFIG not in names:
        raise InvalidInput(field, seen, f"a model with {CONFIG}, {_instead(names, folder)}")
    if part == "all" and not {WEIGHTS, INDEX} & names:
        raise InvalidInput(field, seen, f"a model with weights as safetensors, {_instead(names, folder)}")


def _instead(names: Collection[str], folder: Path) -> str:
    """Name the kind of a repository that lacks a file of a model."""
    if ADAPTER in names:
        difference = f"it has only the difference to {_base(folder)}"
        return f"not an adapter (LoRA): {difference}, so give that as path and this as adapter.path"
    kinds = {Path(name).suffix for name in names} & {".gguf", ".bin", ".pth", ".onnx", ".safetensors"}
    return f"not with {' and '.join(sorted(kinds))} alone" if kinds else "which is not among its files"


def _base(folder: Path) -> str:
    """Return the name of the model that an adapter belongs to."""
    try:
        named = json.loads((folder / ADAPTER).read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        named = None
    return in_short(named, str) if isinstance(named, str) and named else "another model"


def _weights(place: HubPath, folder: Path) -> list[str]:
    """Return the names of a model's files of weights; a file that is not there is refused when the model is read.

    A repository with a single file and an index is read by its single file, as transformers reads it.
    """
    listed = files_of(place)
    single = f"{place.inside}/{WEIGHTS}" if place.inside else WEIGHTS
    is_single = (folder / WEIGHTS).is_file() if listed is None else single in listed
    if is_single or not (folder / INDEX).is_file():
        return [WEIGHTS]
    with suppress(OSError, ValueError, AttributeError, TypeError):
        return sorted({str(name) for name in json.loads((folder / INDEX).read_text())["weight_map"].values()})
    return []


def _below(place: HubPath, names: Iterable[str]) -> list[str]:
    """Return patterns of `fnmatch` for files in a path's folder."""
    return [escape(f"{place.inside}/{name}" if place.inside else name) for name in names]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
