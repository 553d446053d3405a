"""Checks the machine around a run: writable folders, and enough open files."""

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryFile, gettempdir

from prefect.settings import get_current_settings

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.remote_path import CACHE_VARIABLE, cache_folder

OPEN_FILES, PER_DEVICE = 96, 16
"""Files that a process of a run may have open at a time. Ranks of two devices had 82, the run's process 30."""
RAISED = 4096  # a common default, for a lower soft limit that may be raised
COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # torch makes this folder at its import, in ranks below the cache
OWN = "~/.prefect-rlhf"  # leases of local runs, stored plans, probes and profiles


def check_surroundings(devices: int = 1, *, own_leases: bool = False) -> None:
    """Raise InvalidInput for a folder that cannot be written (the error names it), or if too few files may be open.

    `own_leases` means that the run leases its `devices` itself, in the folder `OWN`. A soft limit on open files is
    raised.
    """
    check_open_files(OPEN_FILES + PER_DEVICE * devices)
    for name, folder in written_folders(own_leases=own_leases):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise InvalidInput(name, str(folder), f"a folder that this user can write ({error.strerror})") from error


def check_open_files(least: int) -> None:
    """Raise the soft limit on open files to `least` or more. Raises InvalidInput if the hard limit is lower."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    if hard < least:
        raise InvalidInput("ulimit -n", hard, f"at least {least}: a process of this run may have as many files open")
    if soft < least:
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(min(max(least, RAISED), hard)), limits[1]))


def _set_by(name: str) -> str:
    return name if os.environ.get(name) else "HOME"


def written_folders(*, own_leases: bool) -> Iterator[tuple[str, Path]]:
    """Yield the folders outside the output folder that a run writes to, each with the variable that sets it."""
    try:
        yield "TMPDIR", Path(gettempdir())
    except FileNotFoundError as error:
        raise InvalidInput("TMPDIR", os.environ.get("TMPDIR"), "a folder that this user can write") from error
    try:
        if own_leases:
            yield "HOME", Path(OWN).expanduser()
        settings = get_current_settings()
        if not settings.api.url:  # a temporary server keeps its database there; other runs need no file of it
            yield _set_by("PREFECT_HOME"), settings.home
        if folder := os.environ.get(COMPILED):
            yield COMPILED, Path(folder)
        else:
            yield _set_by(CACHE_VARIABLE), cache_folder()
    except RuntimeError as error:
        raise InvalidInput("HOME", None, "a home folder of this user") from error
