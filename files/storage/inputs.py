"""Models and datasets as their user names them: folders, remote folders, and repositories of the Hugging Face Hub."""

import logging
from dataclasses import replace
from fnmatch import fnmatchcase
from glob import escape, has_magic
from itertools import takewhile
from pathlib import Path, PurePath

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.hub.hub_path import SCHEME, HubPath, hub_path, is_name, named_model
from prefect_rlhf.files.hub.progress import Say
from prefect_rlhf.files.hub.snapshots import Part, at_commit, data_files, dataset_folder, listing
from prefect_rlhf.files.hub.snapshots import model_folder as model_of_hub
from prefect_rlhf.files.model_folder import CONFIG
from prefect_rlhf.files.remote_path import is_remote
from prefect_rlhf.files.storage.mirror import fetch

DEFAULT_BRANCH = "main"  # of every repository
SUFFIXES = (".parquet", ".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".arrow", ".txt", ".gz", ".zip")  # of files

_log = logging.getLogger(__name__)


def model_folder(
    text: str, field: str, part: Part = "all", *, seen: str | None = None, say: Say = _log.warning
) -> Path:
    """Return a model's folder on this machine, with at least `part` of its files.

    It is the folder `text` itself, the updated mirror of a remote folder, or the Hub's copy of a model by its name.
    Raises InvalidInput, at `field` and about the text `seen`, by default `text`, if a remote path or a name leads to no
    model; a folder is not looked at.
    """
    if (place := hub_path(text, field) or named_model(text, field)) is not None:
        return model_of_hub(place, field, seen or text, part, say)
    return fetch(text, field, lambda name: _is_of(name, part)) if is_remote(text) else Path(text)


def dataset_path(text: str, field: str, *, seen: str | None = None, say: Say = _log.warning) -> str:
    """Return a dataset's path or pattern on this machine; remote files are copied first.

    Raises InvalidInput, at `field`, if the remote path is empty, or if its store refuses it or does not answer; about
    the text `seen`, by default `text`.
    """
    if (place := hub_path(text, field)) is not None:
        return _dataset_of_hub(place, field, seen or text, say)
    if not is_remote(text):
        return text
    scheme, _, rest = text.partition("://")
    if not has_magic(rest):
        return str(fetch(text, field))
    names = rest.split("/")
    fixed = list(takewhile(lambda name: not has_magic(name), names))
    pattern = "/".join(names[len(fixed) :])
    mirror = fetch(f"{scheme}://{'/'.join(fixed)}", field, lambda name: fnmatchcase(name, _wide(pattern)))
    return f"{escape(str(mirror))}/{pattern}"


def pinned_model(text: str, field: str, commits: dict[str, str], say: Say) -> str:
    """Return a model's path as all machines of a run read it; for a repository on the Hub, the path names its commit.

    `commits` has the commit of each repository and branch that is known, and gets the new ones. `say` gets a line about
    the commit, and a line if a local folder has the model's name. Raises InvalidInput, at `field`.
    """
    place = hub_path(text, field) or named_model(text, field)
    if place is None and is_name(text):
        say(f"{field}: {text} is a folder here; a model of this name on the Hub would be {SCHEME}{text}")
    return text if place is None else str(_pinned(place, field, text, commits, say))


def pinned_dataset(text: str, field: str, commits: dict[str, str], say: Say) -> str:
    """Return a dataset's path as all machines of a run read it, as `pinned_model` does."""
    place = hub_path(text, field)
    return text if place is None else str(_pinned(place, field, text, commits, say))


def dataset_on_hub(text: str, field: str) -> str | None:
    """Return the files' paths for a dataset on the Hub named by `text`; None for a text that is not a name.

    If the Hub does not answer, or has no such dataset, only the form of such a path is returned.
    """
    if not is_name(text) or PurePath(text).suffix in SUFFIXES:
        return None
    place = hub_path(f"{SCHEME}datasets/{text}", field)
    try:
        return None if place is None else _files_on_hub(place, field, text)
    except InvalidInput:
        return f"{place}/FILE"


def is_on_hub(text: str) -> bool:
    """Whether a path begins with the Hub's scheme."""
    return text.startswith(SCHEME)


def repository(place: HubPath) -> str:
    """Return the key of a path's repository and branch in `commits`."""
    return str(replace(place, inside="", revision=place.revision or DEFAULT_BRANCH))


def _pinned(place: HubPath, field: str, text: str, commits: dict[str, str], say: Say) -> HubPath:
    if place.commit:
        return place
    key = repository(place)
    if key not in commits:
        commits[key] = str(at_commit(place, field, text).revision)
        say(f"{field}: {key.removeprefix(SCHEME)} is at commit {commits[key]}")
    return place.at(commits[key])


def _dataset_of_hub(place: HubPath, field: str, text: str, say: Say) -> str:
    inside = place.inside
    if not inside:
        raise InvalidInput(field, text, f"a file, a folder or a pattern in it: {_files_on_hub(place, field, text)}")
    patterns = [_wide(inside)] if has_magic(inside) else [escape(inside), f"{escape(inside)}/*"]
    folder = dataset_folder(place, field, text, patterns, say)
    return f"{escape(str(folder))}/{inside}" if has_magic(inside) else str(folder / inside)


def _files_on_hub(place: HubPath, field: str, text: str) -> str:
    listed = listing(at_commit(place, field, text), field, text)
    return f"{place}/FILE" if listed is None else data_files(place, listed)


def _wide(pattern: str) -> str:
    """Return a pattern of `glob` for `fnmatch`, whose * matches slashes too."""
    return pattern.replace("**/", "*")


def _is_of(name: str, part: Part) -> bool:
    return name == CONFIG if part == "config" else part == "all" or not name.endswith(".safetensors")
