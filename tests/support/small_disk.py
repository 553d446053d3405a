"""A small file system of its own, to be filled up, turned read-only or broken; only root can mount it."""

import errno
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Make `folder` a tmpfs of so many bytes while the body runs."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        while folder.is_mount():  # twice, once it is read-only
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    """Let what is opened from now on in a `small_disk` be read-only.

    A second mount lies over the first, which Linux leaves writable as long as a run holds its folder's lock.
    """
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    for _ in range(100):  # Linux refuses it while a file is open for writing, as a shard may be
        if not subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], capture_output=True).returncode:
            return
        time.sleep(0.1)
    raise TimeoutError(f"{folder} was never without an open file")


@contextmanager
def breakable_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Make `folder` a file system while the body runs, on an image whose blocks `break_disk` can take away."""
    with small_disk(_below(folder), num_bytes) as below:
        folder.mkdir()
        image = below / "image"
        with image.open("wb") as file:
            file.truncate(num_bytes)  # sparse: blocks are taken when they are written
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
        try:
            yield folder
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def break_disk(folder: Path) -> None:
    """Let writing blocks of a `breakable_disk` that were never written be an I/O error."""
    fill(_below(folder))


def fill(folder: Path) -> None:
    """Leave no byte on the file system of a folder."""
    try:
        with (folder / "filler").open("ab", buffering=0) as file:
            for size in (1 << 16, 1 << 12):
                while file.write(bytes(size)) == size:
                    pass
    except OSError as error:
        assert error.errno == errno.ENOSPC


def _below(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.below")
