"""The version that a run records: the commit of the package's own checkout, and no other's."""

import subprocess

import pytest

from prefect_rlhf.files.installed import commit_of, own_version

pytestmark = pytest.mark.quick


def git(folder, *words):
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", "-C", folder, *name, *words], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def package(tmp_path):
    """A package in a checkout, one of whose rooms is a link to a folder next to it."""
    package = tmp_path / "src" / "package"
    package.mkdir(parents=True)
    (tmp_path / "room").mkdir()
    for file in (package / "code.py", tmp_path / "room" / "more.py", tmp_path / "page.md"):
        file.write_text("1\n")
    (package / "room").symlink_to("../../room")
    (tmp_path / ".gitignore").write_text(".venv\n__pycache__\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return package


def test_a_checkout_has_its_commit_which_is_dirty_once_its_code_differs(package, tmp_path):
    commit = git(tmp_path, "rev-parse", "HEAD").strip()
    assert commit_of(package) == commit
    (tmp_path / "page.md").write_text("2\n")
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "code.pyc").write_text("2")
    assert commit_of(package) == commit
    (tmp_path / "room" / "more.py").write_text("2\n")
    assert commit_of(package) == f"{commit}-dirty"


def test_a_wheel_in_the_environment_of_another_checkout_has_no_commit(package, tmp_path):
    """Nor has a folder without git, nor one whose git is not there."""
    installed = tmp_path / ".venv" / "package"
    installed.mkdir(parents=True)
    (installed / "code.py").write_text("1\n")
    assert commit_of(installed) is None


def test_without_git_the_version_is_known_and_the_commit_is_not(package, monkeypatch, tmp_path_factory):
    assert commit_of(tmp_path_factory.mktemp("no git")) is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit_of(package) is None


def test_variables_of_git_name_no_other_repository(package, tmp_path_factory, monkeypatch):
    """A hook of git, such as one that runs tests, has them."""
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    commit = commit_of(package)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert commit_of(package) == commit is not None


def test_this_package_has_the_version_of_its_project():
    assert own_version().version == "0.1.0" and str(own_version()).startswith("0.1.0")
