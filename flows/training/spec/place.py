"""The folders of a run's files, and of the checkpoint that it continues from: on this machine, or in its mirrors."""

from dataclasses import dataclass
from pathlib import Path

from prefect_rlhf.files.path_text import checked_path, resolved
from prefect_rlhf.files.remote_path import is_remote, local_path, writable_path
from prefect_rlhf.tasks.checkpoints.folders import LATEST, PARAMETER

FIELD = "output_dir"


@dataclass(frozen=True, slots=True)
class RunPlace:
    """The folder that contains the run's folder. `url` is the folder in a store that it mirrors, if it is a mirror."""

    folder: Path
    url: str | None = None


def read_place(output_dir: str) -> RunPlace:
    """Return the place that `output_dir` names. Raises InvalidInput for a text that is no path, or a read-only store.

    >>> read_place("s3://bucket/runs").url, read_place("/tmp/runs")
    ('s3://bucket/runs', RunPlace(folder=PosixPath('/tmp/runs'), url=None))
    """
    if is_remote(output_dir):
        return RunPlace(writable_path(output_dir, FIELD), output_dir)
    return RunPlace(resolved(checked_path(FIELD, output_dir)))


@dataclass(frozen=True, slots=True)
class Resume:
    """The checkpoint that a run continues from: the newest in the run's place, or that of `folder`.

    `folder` belongs to a run or to a checkpoint. `is_own`: the same run wrote it, and was started again.
    """

    folder: Path | None = None
    is_own: bool = False


def read_resume(resume_from: str | None) -> Resume | None:
    """Return the checkpoint that `resume_from` names. Raises InvalidInput for a remote path that has no mirror.

    >>> read_resume("latest"), read_resume("runs/amber")
    (Resume(folder=None, is_own=False), Resume(folder=PosixPath('runs/amber'), is_own=False))
    """
    if resume_from is None:
        return None
    return Resume() if resume_from == LATEST else Resume(local_path(resume_from, PARAMETER))
