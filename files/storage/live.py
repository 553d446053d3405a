"""Folders of a mirror that a process of this machine writes: other processes must not replace or remove their files.

The disk of a live run may have newer files than its store. A lock marks the run as live; the kernel frees it when the
process ends, however it ends.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.remote_path import cache_folder, remote_path, shown

LOCKS = "locks"  # folder in the cache
WAIT_SECONDS = 20.0
"""How long a run waits for its own earlier process to end."""


def lock_file(name: str) -> Path:
    """Return the file with the lock for `name` on this machine; create its folder if needed."""
    locks = cache_folder() / LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    return locks / blake2b(name.encode(), digest_size=12).hexdigest()


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """While the block runs, keep other processes of this machine from changing the folder, if it is a mirror.

    Raises InvalidInput, at output_dir, if another process holds it and does not end within WAIT_SECONDS.
    """
    if remote_path(folder) is None:
        yield
        return
    with lock_file(_name(folder)).open("w") as lock:
        deadline = time.monotonic() + WAIT_SECONDS
        while not _locked(lock.fileno(), fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                expected = "a folder that no other process writes; an earlier process of this run has not ended"
                raise InvalidInput("output_dir", shown(folder), expected)
            time.sleep(0.1)
        yield


def is_live(path: Path) -> bool:
    """Whether a process of this machine is writing to a mirror's file or folder, or to a folder above it."""
    url = remote_path(path)
    above = [] if url is None else [one for one in (path, *path.parents) if remote_path(one) is not None]
    return any(_is_held(one) for one in above)


def _is_held(folder: Path) -> bool:
    file = lock_file(_name(folder))
    if not file.is_file():
        return False
    with file.open() as lock:
        return not _locked(lock.fileno(), fcntl.LOCK_SH)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _name(folder: Path) -> str:
    return f"written: {folder}"
