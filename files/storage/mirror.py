"""Mirrors of remote paths on this machine: copies to read, made once by the first process that needs them.

A file in the mirror is current if it has the store's size and time, which are requested before each use.
"""

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.files.remote_path import local_path, remote_path
from prefect_rlhf.files.storage.answers import NO_BUCKET, explained
from prefect_rlhf.files.storage.live import is_live, lock_file
from prefect_rlhf.files.storage.patience import patiently
from prefect_rlhf.files.storage.stores import Store, open_store

COPY_BYTES = 4 << 20

Wanted = Callable[[str], bool]  # its argument is a file's name below the path


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a store. `name` is its path below the requested path, empty for that path itself."""

    path: str
    name: str
    size: int | None
    time_ns: int | None  # of its last change, since 1970; None if the store does not report it


def on_this_machine(folder: Path) -> Path:
    """Return a run's folder; for a mirror, first update it from the store, which another machine may have written."""
    url = remote_path(folder)
    return folder if url is None else fetch(url, "resume_from")


def fetch(url: str, field: str, wanted: Wanted = lambda name: True, *, may_be_absent: bool = False) -> Path:
    """Update the wanted part of a remote path's mirror from the store, and return the mirror.

    In a folder that a live process of this machine writes, files are added, but never replaced or removed. Raises
    InvalidInput, at `field`, if the remote path is empty, or if its store refuses it or does not answer; with
    `may_be_absent`, not for an empty path.
    """
    mirror = local_path(url, field)
    store = open_store(url, field)
    with explained(url, field), _alone(url):
        try:
            there = patiently(url, lambda: list_files(store))
        except FileNotFoundError as error:
            if not may_be_absent or NO_BUCKET in str(error):
                raise
            there = []
        found = [file for file in there if wanted(file.name)]
        for file in found:
            _copy_unless_current(store, file, mirror / file.name if file.name else mirror, url)
        _remove_others(mirror, {file.name for file in found}, wanted)
    return mirror


def list_files(store: Store) -> list[RemoteFile]:
    """Return every file at or below the store's path, sorted by name.

    Raises FileNotFoundError if no file exists, and InvalidInput for a name that leads outside the path.
    """
    from pyarrow.fs import FileSelector, FileType

    own = store.files.get_file_info(store.path)
    if own.type == FileType.File:
        return [RemoteFile(own.path, "", own.size, own.mtime_ns)]
    try:
        below = store.files.get_file_info(FileSelector(store.path, recursive=True))
    except OSError as error:
        if "No such file or directory" not in str(error) or isinstance(error, FileNotFoundError):
            raise
        raise FileNotFoundError(str(error)) from error  # GCS at a folder whose files have all been deleted
    files = (info for info in below if info.type == FileType.File and not info.path.endswith("/"))
    found = [RemoteFile(info.path, _name_below(store, info.path), info.size, info.mtime_ns) for info in files]
    return sorted(found, key=lambda file: file.name)


def _name_below(store: Store, path: str) -> str:
    """Return the name of a listed file below the store's path, which becomes its path in the mirror.

    The names in a listing are the store's own: an archive may have `../` in them.
    """
    name = path.removeprefix(store.path).removeprefix("/")
    parts = name.split("/")
    if {"", ".", ".."} & {*parts} or "\0" in name:
        raise InvalidInput(store.field, store.url, f"file names without empty parts, . and ..; not {in_short(name)}")
    return name


def _copy_unless_current(store: Store, file: RemoteFile, target: Path, url: str) -> None:
    if target.exists() and is_live(target):
        return
    if target.is_dir():
        shutil.rmtree(target)
    if target.is_file() and _is_current(file, target):
        return

    def copy(part: Path) -> None:
        with store.files.open_input_stream(file.path) as source, part.open("wb") as out:
            shutil.copyfileobj(source, out, COPY_BYTES)
        if file.time_ns is not None:
            os.utime(part, ns=(file.time_ns, file.time_ns))

    write_atomically(target, lambda part: patiently(url, lambda: copy(part)))


def _is_current(file: RemoteFile, target: Path) -> bool:
    status = target.stat()
    return status.st_size == file.size and file.time_ns in (None, status.st_mtime_ns)


def _remove_others(mirror: Path, names: set[str], wanted: Wanted) -> None:
    """Remove files of the mirror that the store no longer has."""
    for file in mirror.rglob("*") if mirror.is_dir() else ():
        name = file.relative_to(mirror).as_posix()
        if file.is_file() and wanted(name) and name not in names and not is_live(file):
            file.unlink()


@contextmanager
def _alone(url: str) -> Iterator[None]:
    """Let only a single process of the machine at a time copy the files of a remote path."""
    with lock_file(url).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
