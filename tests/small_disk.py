"""A small file system of its own, to be filled up or turned read-only; only root can mount it."""

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
