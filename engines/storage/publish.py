"""Files of a mirror to its store: what is written on this machine appears there, one file of it last.

An object store has neither renames nor folders, so whoever reads a folder looks for the file that comes last.
"""

from __future__ import annotations

import os
import shutil
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

from prefect_rlhf.engines.storage.answers import explained, uploading
from prefect_rlhf.engines.storage.mirror import COPY_BYTES, RemoteFile, list_files
from prefect_rlhf.engines.storage.patience import patiently
from prefect_rlhf.engines.storage.stores import Store, open_store
from prefect_rlhf.placement.remote_path import remote_path

FIELD = "output_dir"  # all that a run writes lies in it


def publish(path: Path, last: str | None = None, to: Path | None = None) -> int:
    """Upload a file, or a folder with all below it, if it belongs to a mirror; return the bytes.

    Of a folder the file named `last` is removed at the store first and comes after all others. `to` is its place in the
    mirror if it is not `path` yet. Raises OutputFailed, which names the remote path.
    """
    url = remote_path(to or path)
    if url is None:
        return 0
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    files.sort(key=lambda file: file.relative_to(path).as_posix() == last)
    with uploading(url):
        store = open_store(url, FIELD)
        if last is not None:
            patiently(url, lambda: _delete(store, last))
        for file in files:
            name = "" if file == path else file.relative_to(path).as_posix()
            patiently(url, partial(_upload, store, file, name))
    return sum(file.stat().st_size for file in files)


def withdraw(path: Path, first: str | None = None) -> None:
    """Delete what a file or folder of a mirror is at the store, the file named `first` before all others."""
    url = remote_path(path)
    if url is None:
        return
    with uploading(url):
        store = open_store(url, FIELD)
        if first is not None:
            patiently(url, lambda: _delete(store, first))
        for file in patiently(url, lambda: _files(store)):
            patiently(url, partial(_delete_path, store, file.path))


def names_at_store(path: Path) -> set[str]:
    """Return the names of all files that a folder of a mirror has at the store; none of one that mirrors nothing."""
    url = remote_path(path)
    if url is None:
        return set()
    with uploading(url):
        store = open_store(url, FIELD)
        return {file.name for file in patiently(url, lambda: _files(store))}


def check_writable(url: str) -> None:
    """Write and delete a file of a few bytes. Raises InvalidInput, at output_dir, where that cannot be."""
    with explained(url, FIELD):
        store = open_store(url, FIELD)
        path = f"{store.path}/.writable-{uuid.uuid4().hex}"
        patiently(url, lambda: _write_bytes(store, path))
        patiently(url, lambda: _delete_path(store, path))


def _write_bytes(store: Store, path: str) -> None:
    with store.files.open_output_stream(path) as out:
        out.write(b"prefect-rlhf")


def _files(store: Store) -> list[RemoteFile]:
    try:
        return list_files(store)
    except FileNotFoundError:
        return []


def _upload(store: Store, file: Path, name: str) -> None:
    """Write a file, and give it the time that the store says: so it is known as current here."""
    path = f"{store.path}/{name}" if name else store.path
    with file.open("rb") as source, store.files.open_output_stream(path) as out:
        shutil.copyfileobj(source, out, COPY_BYTES)
    time_ns = store.files.get_file_info(path).mtime_ns
    if time_ns is not None:
        os.utime(file, ns=(time_ns, time_ns))


def _delete(store: Store, name: str) -> None:
    from pyarrow.fs import FileType

    path = f"{store.path}/{name}"
    if store.files.get_file_info(path).type == FileType.File:
        _delete_path(store, path)


def _delete_path(store: Store, path: str) -> None:
    """Delete a file, which may be gone already: by an earlier request whose answer did not arrive."""
    with suppress(FileNotFoundError):
        store.files.delete_file(path)
