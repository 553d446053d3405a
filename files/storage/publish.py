"""Uploads a mirror's files to its store. A chosen file of a folder is uploaded last.

An object store has neither renames nor folders, so readers of a folder look for the file that is uploaded last.
"""

import os
import shutil
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path

from prefect_rlhf.files.remote_path import remote_path
from prefect_rlhf.files.storage.answers import explained, uploading
from prefect_rlhf.files.storage.mirror import COPY_BYTES, RemoteFile, list_files
from prefect_rlhf.files.storage.patience import patiently
from prefect_rlhf.files.storage.stores import Store, open_store

FIELD = "output_dir"  # it contains all files of a run


def publish(path: Path, last: str | None = None, to: Path | None = None) -> int:
    """Upload a file, or a folder with all files below it, if it belongs to a mirror; return the bytes.

    In a folder, the file named `last` is first deleted at the store and then uploaded after all others. `to` is its
    path in the mirror if `path` is not yet there. Raises OutputFailed, which names the remote path.
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
    """Delete a mirror's file or folder at the store, the file named `first` before all others."""
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
    """Return the names of all files of a mirror's folder at the store; empty for a folder that is not a mirror."""
    url = remote_path(path)
    if url is None:
        return set()
    with uploading(url):
        store = open_store(url, FIELD)
        return {file.name for file in patiently(url, lambda: _files(store))}


def check_writable(url: str) -> None:
    """Write and delete a file of a few bytes. Raises InvalidInput, at output_dir, if that fails."""
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
    """Upload a file, and give the local file the store's time, so that the mirror counts as current."""
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
    """Delete a file, if it exists: an earlier request may have deleted it although its answer did not arrive."""
    with suppress(FileNotFoundError):
        store.files.delete_file(path)
