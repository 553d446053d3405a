"""Versions of installed packages, from their metadata without importing them, and this package's commit."""

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from prefect_rlhf.files.processes.environment import shown

OWN = "prefect-rlhf"
PACKAGE = Path(__file__).resolve().parents[1]
GIT_SECONDS = 10.0


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None.

    >>> installed_version("no-such-package") is None
    True
    """
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class OwnVersion:
    """This package's version, and the commit that it was installed from, with `-dirty` if files differ.

    The commit is None for a wheel, and for a folder without git.

    >>> print(OwnVersion("0.1.0", "1f3a-dirty")), print(OwnVersion("0.1.0", None))
    0.1.0 (commit 1f3a-dirty)
    0.1.0
    (None, None)
    """

    version: str
    commit: str | None

    def __str__(self) -> str:
        return self.version if self.commit is None else f"{self.version} (commit {self.commit})"


@cache
def own_version() -> OwnVersion:
    """Return the version of this package as it was when this process first asked."""
    return OwnVersion(installed_version(OWN) or "unknown", commit_of(PACKAGE) or _installed_commit())


def commit_of(folder: Path) -> str | None:
    """Return the commit of the checkout that contains a folder, with `-dirty` if files differ; None without git.

    A folder that a checkout ignores, such as a virtual environment, has no commit.
    """
    tracked = _git(folder, "ls-files", "--error-unmatch", "--", ".")
    commit = _git(folder, "rev-parse", "--verify", "HEAD") if tracked else None
    if not commit:
        return None
    linked = (str(part.resolve()) for part in folder.iterdir() if part.is_symlink())  # rooms of a checkout are links
    return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--", ".", *linked) else commit


def _git(folder: Path, *words: str) -> str | None:
    """Return git's output about a folder; None if git fails, does not end, or is not installed."""
    variables = shown(os.environ) | {"GIT_OPTIONAL_LOCKS": "0"}  # a look must not disturb the person's own git
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *words],
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _installed_commit() -> str | None:
    """Return the commit of a package that pip installed from a repository's address."""
    try:
        origin = json.loads(distribution(OWN).read_text("direct_url.json") or "{}")
        commit = origin.get("vcs_info", {}).get("commit_id")
    except (PackageNotFoundError, OSError, ValueError, AttributeError):
        return None
    return commit if isinstance(commit, str) else None
