"""A small file system of its own, to be filled up, turned read-only or broken; only root can mount it."""

import errno
import subprocess
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
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


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
