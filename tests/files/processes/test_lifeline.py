"""A program of somebody else ends with the process that started it, however that one dies."""

import os
import signal
import subprocess
import sys
import time

import pytest

from prefect_rlhf.files.processes.lifeline import ending_with
from tests.support.alive import is_alive

PARENT = """
import os, subprocess, sys
from prefect_rlhf.files.processes.lifeline import ending_with
from tests.support.alive import is_alive

lifeline, _ = os.pipe()
command = ending_with(lifeline, [sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"])
child = subprocess.Popen(command, pass_fds=(lifeline,), stdout=subprocess.PIPE, process_group=0)
child.stdout.readline()  # it serves
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_program_ends_with_the_process_that_started_it(how):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert is_alive(child)
    parent.send_signal(how)
    parent.wait(30)
    deadline = time.monotonic() + 30
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_a_module_sees_the_arguments_and_the_name_that_python_gives_it():
    plain = [sys.executable, "-m", "calendar", "2026", "11"]
    lifeline, end = os.pipe()
    given = {"capture_output": True, "text": True, "timeout": 60}
    ended = subprocess.run(ending_with(lifeline, plain), pass_fds=(lifeline,), **given)
    os.close(lifeline)
    os.close(end)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == subprocess.run(plain, **given).stdout
