"""`make release`: what it refuses, and what a release leaves."""

import datetime
import runpy
import subprocess
from pathlib import Path

import pytest

RELEASE = runpy.run_path(str(Path(__file__).parents[2] / ".ci" / "release.py"))
MAKEFILE = "dist:\n\tmkdir -p dist && cp pyproject.toml dist/\n"
FILES = {
    "pyproject.toml": '[project]\nname = "some"\nversion = "0.1.0"\n\n[tool.other]\nversion = "7"\n',
    "CHANGELOG.md": "# Changelog\n\n## Unreleased (0.2.0)\n- a feature\n\n## 0.1.0 (2026-01-01)\n- the first\n",
    "Makefile": MAKEFILE,
    ".gitignore": "dist/\n",
}


def git(folder, *words):
    told = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=60)
    return told.stdout


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name, value in (("NAME", "a"), ("EMAIL", "a@b.c")):
        monkeypatch.setenv(f"GIT_AUTHOR_{name}", value)
        monkeypatch.setenv(f"GIT_COMMITTER_{name}", value)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "begin")
    return tmp_path


def release(folder, version="0.2.0"):
    return RELEASE["released"](folder, version, datetime.date(2026, 12, 1))


def test_a_release_is_a_commit_with_its_date_a_tag_and_files_to_publish(checkout):
    said = release(checkout)
    assert git(checkout, "log", "-1", "--format=%s", "v0.2.0").strip() == "Release 0.2.0"
    assert git(checkout, "status", "--porcelain") == ""
    project = (checkout / "pyproject.toml").read_text()
    assert 'version = "0.2.0"' in project and 'version = "7"' in project
    assert "## 0.2.0 (2026-12-01)\n- a feature" in (checkout / "CHANGELOG.md").read_text()
    assert (checkout / "dist" / "pyproject.toml").read_text() == project
    assert "git push origin main v0.2.0" in said and "twine upload" in said


def dirty(folder):
    (folder / "Makefile").write_text(MAKEFILE + "# more\n")


def tagged(folder):
    git(folder, "tag", "v0.2.0")


def unwritten(folder):
    (folder / "CHANGELOG.md").write_text("# Changelog\n")
    git(folder, "commit", "--quiet", "--all", "-m", "forget it")


def unbuilt(folder):
    (folder / "Makefile").write_text("dist:\n\t@echo no compiler >&2; exit 3\n")
    git(folder, "commit", "--quiet", "--all", "-m", "break it")


@pytest.mark.parametrize(
    ("harm", "version", "said"),
    [
        (lambda folder: None, "two", r"^VERSION: got 'two', expected a version such as 0.1.0"),
        (lambda folder: None, "", r"^VERSION: got '', expected"),
        (dirty, "0.2.0", r"^the tree has 1 uncommitted changes, 'M Makefile' first; commit them$"),
        (tagged, "0.2.0", r"^VERSION: 0.2.0 exists, as tag v0.2.0; take the next number$"),
        (unwritten, "0.2.0", r"^CHANGELOG.md: no heading '## Unreleased \(0.2.0\)'; write what the release brings"),
        (unbuilt, "0.2.0", r"^make dist ended with status 2: "),
    ],
)
def test_an_impossible_release_is_refused_in_a_line_and_changes_no_file(checkout, harm, version, said):
    harm(checkout)
    before = git(checkout, "status", "--porcelain"), git(checkout, "rev-parse", "HEAD")
    with pytest.raises(RELEASE["Refused"], match=said) as refused:
        release(checkout, version)
    assert "\n" not in str(refused.value)
    assert (git(checkout, "status", "--porcelain"), git(checkout, "rev-parse", "HEAD")) == before


def test_a_missing_tool_is_named(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(RELEASE["Refused"], match="^git: not found; install it$"):
        release(checkout)
