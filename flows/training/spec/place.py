"""A run's folders, and the checkpoint it continues from: on this machine, or in a mirror of a remote store."""

from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.files.path_text import checked_path, resolved
from prefect_rlhf.files.remote_path import is_remote, local_path, writable_path
from prefect_rlhf.tasks.checkpoints.folders import LATEST, PARAMETER

FIELD = "output_dir"


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The folder that contains the run's folder. If it is a mirror, `url` is the store's folder."""

    folder: Path
    url: str | None = None


def read_place(output_dir: str) -> RunPlace:
    """Return the place named by `output_dir`. Raises InvalidInput for invalid paths and read-only stores.

    >>> read_place("s3://bucket/runs").url, read_place("/tmp/runs")
    ('s3://bucket/runs', RunPlace(folder=PosixPath('/tmp/runs'), url=None))
    """
    if is_remote(output_dir):
        return RunPlace(writable_path(output_dir, FIELD), output_dir)
    return RunPlace(resolved(checked_path(FIELD, output_dir)))


@dataclass(frozen=True, slots=True)
class Resume:
    """The checkpoint that a run continues from: its own newest, or the checkpoint in `folder`.

    `folder` is a run's or a checkpoint's. `is_own` says that the run itself wrote it and was restarted.
    """

    folder: Path | None = None
    is_own: bool = False


def read_resume(resume_from: str | None) -> Resume | None:
    """Return the checkpoint named by `resume_from`. Raises InvalidInput for a remote path without a mirror.

    >>> read_resume("latest"), read_resume("runs/amber")
    (Resume(folder=None, is_own=False), Resume(folder=PosixPath('runs/amber'), is_own=False))
    """
    if resume_from is None:
        return None
    return Resume() if resume_from == LATEST else Resume(local_path(resume_from, PARAMETER))
