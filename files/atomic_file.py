"""Files, folders and links that appear under their names only when they are complete."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prefect_rlhf.errors.errors import OutputFailed

_UNFINISHED = re.compile(r".+\.\d+\.part")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise OutputFailed, naming the file, if the body cannot write it: full disk, quota, read-only folder."""
    try:
        yield
    except OSError as error:
        raise OutputFailed(f"{path} cannot be written: {error.strerror or error}") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Let `write` make a file or folder next to `path`, then rename it to `path`, over an existing file; return `path`.

    No process sees an unfinished file, even if several processes write at once, or after a power failure. A write that
    raises leaves no file. Raises OutputFailed, which names `path`.
    """
    part = path.with_name(f"{path.name}{_own_ending()}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(part)  # of an earlier process with this id, which was killed
        try:
            write(part)
            _flush_all(part)
        except BaseException:
            _remove(part)
            raise
        if part.is_dir() and not part.is_symlink():
            _remove(path)  # a folder can replace only an empty folder
        return part.replace(path)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes left unfinished below a folder that no other process writes to any more."""
    for part in list(folder.rglob("*.part")):
        if _UNFINISHED.fullmatch(part.name) and not part.name.endswith(_own_ending()):  # another thread may write
            with suppress(OSError):
                _remove(part)


def _own_ending() -> str:
    return f".{os.getpid()}.part"


def flush_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_all(path: Path) -> None:
    if path.is_symlink():
        return
    for below in path.iterdir() if path.is_dir() else ():
        _flush_all(below)
    flush_to_disk(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
