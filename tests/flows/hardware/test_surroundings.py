"""Folders that a run writes and the files that it may have open: refused at once, by name."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, temporary_settings

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.surroundings import check_surroundings

LIMIT = """
import resource
from prefect_rlhf.flows.hardware.surroundings import check_surroundings
check_surroundings()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A home of this test alone, without variables that name other folders."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PREFECT_RLHF_CACHE", "PREFECT_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    with temporary_settings({PREFECT_HOME: str(tmp_path / ".prefect")}, restore_defaults={PREFECT_API_URL}):
        yield


def test_a_run_with_its_own_home_is_accepted(tmp_path):
    check_surroundings(2, own_leases=True)
    assert (tmp_path / ".prefect").is_dir()


@pytest.mark.parametrize("name", ["HOME", "PREFECT_RLHF_CACHE", "PREFECT_HOME", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_folder_that_cannot_be_written_is_named_with_its_variable(name, monkeypatch):
    monkeypatch.setenv(name, "/proc/none")
    home = {PREFECT_HOME: "/proc/none"} if name == "PREFECT_HOME" else {}
    says = rf"^{name}: got '/proc/none.*', expected a folder that this user can write \(No such file or directory\)$"
    with temporary_settings(home), pytest.raises(InvalidInput, match=says):
        check_surroundings(own_leases=True)


def test_a_run_with_a_server_needs_no_home_but_a_cache(tmp_path, monkeypatch):
    """Such as one in a container with a read-only root, under a worker, which has leased the devices."""
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setenv("PREFECT_RLHF_CACHE", str(tmp_path))
    monkeypatch.setenv("PREFECT_HOME", "/proc/none")
    with temporary_settings({PREFECT_HOME: "/proc/none", PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        check_surroundings()


def test_a_user_without_a_home_is_told_so(monkeypatch):
    """As in a container whose user has no entry in /etc/passwd."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(InvalidInput, match="^HOME: got None, expected a home folder of this user$"):
        check_surroundings(own_leases=True)


def test_a_run_at_a_terminal_with_an_unwritable_home_ends_in_one_line(tmp_path):
    """Before anything is read: the model need not exist."""
    command = [Path(sys.executable).with_name("prefect-rlhf"), "sft", "--devices", "1"]
    command += [word for name in ("chats", "held_out", "actor") for word in ("-p", f"{name}.path=none")]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    environment |= {"PREFECT_HOME": "/proc/none"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    says = "prefect-rlhf: PREFECT_HOME: got '/proc/none', expected a folder that this user can write"
    assert done.stderr == f"{says} (No such file or directory)\n" and done.returncode == 2


def limited(soft, hard):
    """What a process with these limits of open files prints, or the last line of its error."""
    limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))  # noqa: E731
    command = [sys.executable, "-c", LIMIT]
    done = subprocess.run(command, preexec_fn=limits, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() or done.stderr.splitlines()[-1]


def test_too_few_open_files_are_named_and_a_soft_limit_is_raised():
    assert "InvalidInput: ulimit -n: got 64, expected at least" in limited(64, 64)
    assert limited(64, 300) == "(300, 300)"
    assert limited(256, 8192) == "(256, 8192)"
