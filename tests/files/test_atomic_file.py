"""What is written atomically is whole under its name, or not there."""

import os
import signal
import subprocess
import sys

import pytest

from prefect_rlhf.errors.errors import OutputFailed
from prefect_rlhf.files.atomic_file import remove_unfinished, write_atomically

pytestmark = pytest.mark.quick


def test_a_file_replaces_its_predecessor(tmp_path):
    for text in ("first", "second"):
        assert write_atomically(tmp_path / "new" / "plan.yaml", lambda part, text=text: part.write_text(text))
    assert [(p.name, p.read_text()) for p in (tmp_path / "new").iterdir()] == [("plan.yaml", "second")]


def test_a_folder_replaces_its_predecessor(tmp_path):
    def write(part):
        part.mkdir()
        (part / "config.json").write_text("{}")

    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "old.bin").write_text("")
    write_atomically(tmp_path / "actor", write)
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["actor", "actor/config.json"]


def test_a_link_replaces_its_predecessor(tmp_path):
    for run in ("run-1", "run-2"):
        (tmp_path / run).mkdir()
        write_atomically(tmp_path / "latest", lambda part, run=run: part.symlink_to(run))
    assert (tmp_path / "latest").readlink().name == "run-2"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "run-1", "run-2"]


@pytest.mark.parametrize("half", ["file", "folder"])
def test_a_failed_write_keeps_the_old_file(tmp_path, half):
    def dies_in_the_middle(part):
        if half == "folder":
            part.mkdir()
        (part / "half" if half == "folder" else part).write_text("ha")
        raise OSError("disk full")

    write_atomically(tmp_path / "plan.yaml", lambda part: part.write_text("whole"))
    with pytest.raises(OutputFailed, match=r"plan\.yaml cannot be written: disk full"):
        write_atomically(tmp_path / "plan.yaml", dies_in_the_middle)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("plan.yaml", "whole")]


KILLED = """
import os, signal, sys
from pathlib import Path
from prefect_rlhf.files.atomic_file import write_atomically

def write(part):
    part.mkdir()
    (part / "model.safetensors").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)

write_atomically(Path(sys.argv[1]), write)
"""


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path):
    """Not what another thread of this process is writing now, and no file that only looks alike."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "run" / "actor")], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [path.suffix for path in (tmp_path / "run").iterdir()] == [".part"]
    own, alike = tmp_path / "run" / f"plan.svg.{os.getpid()}.part", tmp_path / "run" / "mine.part"
    for file in (own, alike):
        file.write_text("")
    remove_unfinished(tmp_path)
    assert sorted((tmp_path / "run").iterdir()) == sorted([own, alike])
