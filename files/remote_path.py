"""Paths with a scheme, such as s3://: how to recognise them, and the local folder that mirrors each.

The mirror's name contains the remote path, so every process on every node can convert between the two.
"""

import os
import re
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.path_text import resolved

CACHE_VARIABLE = "PREFECT_RLHF_CACHE"
CACHE = "~/.cache/prefect-rlhf"
MIRRORS = "remote-paths"  # folder in the cache
READ_ONLY = ("hf", "http", "https", "zip", "tar", "libarchive", "data", "github", "git", "gist", "reference")
"""Schemes that we only read: they cannot be written, or not by several processes at a time; the Hub makes a commit per
file."""
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")


def is_remote(text: str) -> bool:
    """Whether a path is not on a file system of this machine.

    >>> is_remote("s3://bucket/models/llama"), is_remote("models/llama")
    (True, False)
    """
    return _SCHEME.match(text) is not None


def scheme_of(url: str) -> str:
    """Return the part before `://`.

    >>> scheme_of("s3://bucket/models/llama")
    's3'
    """
    return url.partition("://")[0]


def local_path(text: str, field: str) -> Path:
    """Return a path on this machine, which need not exist: the path itself, or the mirror of a remote path.

    Raises InvalidInput, at `field`, for a remote path that has no mirror.

    >>> local_path("models/llama", "actor.path").as_posix()
    'models/llama'
    """
    if not is_remote(text):
        return Path(text)
    scheme, _, rest = text.partition("://")
    names = rest.rstrip("/").split("/")
    if not all(names) or {".", ".."} & {*names}:
        raise InvalidInput(field, text, f"{scheme}://, a bucket or host, and names between single slashes")
    return cache_folder() / MIRRORS / scheme / Path(*names)


def writable_path(text: str, field: str) -> Path:
    """Return a path on this machine as `local_path` does. Raises InvalidInput for a read-only scheme.

    >>> writable_path("https://host/runs", "output_dir")
    Traceback (most recent call last):
    prefect_rlhf.errors.errors.InvalidInput: output_dir: got 'https://host/runs', expected a folder, or s3:// or \
gs://: https:// is read-only
    """
    scheme = scheme_of(text) if is_remote(text) else ""
    if scheme in READ_ONLY:
        raise InvalidInput(field, text, f"a folder, or s3:// or gs://: {scheme}:// is read-only")
    if scheme == "memory":
        raise InvalidInput(field, text, "a folder, or s3:// or gs://: memory:// ends with its process")
    return local_path(text, field)


def require_local(text: str, field: str) -> Path:
    """Return a path on this machine. Raises InvalidInput, at `field`, for a remote path."""
    if is_remote(text):
        raise InvalidInput(field, text, "a path of this machine, without a scheme")
    return Path(text)


def remote_path(path: Path) -> str | None:
    """Return the remote path that a local file or folder mirrors; None if it is not a mirror.

    >>> remote_path(local_path("s3://bucket/models/llama", "actor.path"))
    's3://bucket/models/llama'
    """
    mirrors = cache_folder() / MIRRORS
    if not path.is_relative_to(mirrors) or len(names := path.relative_to(mirrors).parts) < 2:
        return None
    return f"{names[0]}://{'/'.join(names[1:])}"


def shown(path: Path) -> str:
    """Return a path as the user gave it."""
    return remote_path(path) or str(path)


def cache_folder() -> Path:
    """Return this machine's folder for copies of remote files."""
    return resolved(Path(os.environ.get(CACHE_VARIABLE) or CACHE))
