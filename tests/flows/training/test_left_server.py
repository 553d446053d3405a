"""A temporary server ends with the process that started it, however that ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support.alive import is_alive
from tests.support.migrated_database import put_database

pytestmark = pytest.mark.slow
PROGRAM = """
import os, sys
from pathlib import Path
from prefect_rlhf.flows.training.server import check_server
check_server()
print(*" ".join(file.read_text() for file in Path("/proc/self/task").glob("*/children")).split(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("ended_by", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.all)])
def test_no_server_is_left_behind_by_a_process_that_is_killed_before_its_run_begins(tmp_path, ended_by):
    put_database(tmp_path / "prefect")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    variables |= {"PREFECT_HOME": str(tmp_path / "prefect"), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        servers = [int(pid) for pid in starter.stdout.readline().split()]
        assert servers and all(map(is_alive, servers))
        starter.send_signal(ended_by)
        starter.wait()
    for _ in range(600):
        if not any(map(is_alive, servers)):
            return
        time.sleep(0.1)
    raise AssertionError(f"the server is left behind: {servers}")


MISTAKEN = """
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.training.server import server_beside
try:
    with server_beside() as check_server:
        raise InvalidInput("plan", "x", "y")
except InvalidInput:
    print("refused", flush=True)
"""


def test_a_mistake_is_not_told_later_because_a_server_starts(tmp_path):
    """The process ends as soon as the body does, with no word of the server and none left."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path), "HOME": str(tmp_path)}
    started = [sys.executable, "-c", MISTAKEN]
    ended = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "refused\n")
    assert "Traceback" not in ended.stderr and "Fatal" not in ended.stderr
