"""A temporary folder for a node's rank processes. Files that their libraries leave there are removed at the end.

Ranks end without exit handlers, so libraries that remove their temporary files in such a handler do not.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from prefect_rlhf.files.atomic_file import writing

PREFIX = "prefect-rlhf-ranks-"
_YOUNG_SECONDS = 60.0  # the maker of a folder may not have locked it yet


def make_own_folder() -> tuple[Path, int]:
    """Make a folder, and return it with a descriptor that holds a lock to mark it as in use.

    Every process that inherits the descriptor holds the lock. Unlocked folders of this user are removed, because their
    processes were killed. Raises OutputFailed.
    """
    _remove_left(Path(tempfile.gettempdir()))
    with writing(Path(tempfile.gettempdir())):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, held


def _remove_left(temporary: Path) -> None:
    for folder in temporary.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's folder, or in use, or removed meanwhile
            status = folder.lstat()
            if status.st_uid != os.geteuid() or time.time() - status.st_ctime < _YOUNG_SECONDS:
                continue
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
