"""Make a release: `make release VERSION=0.1.0` checks, bumps, builds and tags here. It publishes nothing."""

import datetime
import re
import shutil
import subprocess
import sys
from pathlib import Path

NUMBER = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
TOOLS = ("git", "make")
AFTERWARDS = """{tag} is committed and tagged here; dist/ has its source archive and wheel. To publish:
  git push origin main {tag}
  .venv-dist/bin/twine upload dist/*"""


class Refused(Exception):
    """Why there is no release, in a line."""


def released(folder: Path, version: str, today: datetime.date) -> str:
    """Commit and tag `version` of the checkout in `folder`; return what a person does next. Raises Refused."""
    check(folder, version)
    tag, project, changelog = f"v{version}", folder / "pyproject.toml", folder / "CHANGELOG.md"
    number = re.compile(r'^version = ".*"$', re.MULTILINE)
    project.write_text(number.sub(f'version = "{version}"', project.read_text(), count=1))
    changelog.write_text(changelog.read_text().replace(heading(version), f"## {version} ({today})\n", 1))
    try:
        run(folder, "make", "dist")
    except Refused:
        run(folder, "git", "checkout", "--quiet", "--", project.name, changelog.name)
        raise
    run(folder, "git", "commit", "--quiet", "--message", f"Release {version}", "--", project.name, changelog.name)
    run(folder, "git", "tag", "--annotate", "--message", f"prefect-rlhf {version}", tag)
    return AFTERWARDS.format(tag=tag)


def check(folder: Path, version: str) -> None:
    """Raise Refused unless `version` can be released from this checkout."""
    if not NUMBER.fullmatch(version):
        raise Refused(f"VERSION: got {version!r}, expected a version such as 0.1.0 or 0.2.0rc1")
    for tool in TOOLS:
        if shutil.which(tool) is None:
            raise Refused(f"{tool}: not found; install it")
    if changed := run(folder, "git", "status", "--porcelain").splitlines():
        raise Refused(f"the tree has {len(changed)} uncommitted changes, {changed[0].strip()!r} first; commit them")
    if run(folder, "git", "tag", "--list", f"v{version}").strip():
        raise Refused(f"VERSION: {version} exists, as tag v{version}; take the next number")
    if heading(version) not in (folder / "CHANGELOG.md").read_text():
        raise Refused(f"CHANGELOG.md: no heading {heading(version).strip()!r}; write what the release brings below it")


def heading(version: str) -> str:
    """Return the line that a version's features stand below until its release."""
    return f"## Unreleased ({version})\n"


def run(folder: Path, *command: str) -> str:
    """Return what a command printed. Raises Refused with its last line if it failed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise Refused(f"{' '.join(command)} ended with status {done.returncode}: {said}")
    return done.stdout


if __name__ == "__main__":
    try:
        version = sys.argv[1] if len(sys.argv) > 1 else ""
        sys.stdout.write(released(Path.cwd(), version, datetime.date.today()) + "\n")
    except Refused as refused:
        sys.exit(str(refused))
