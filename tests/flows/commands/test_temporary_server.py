"""A run without a Prefect server of its own has a temporary one: it starts beside the run's checks, Ctrl-C at a
terminal does not end it before the run, and it ends with the run, even if that is killed.
"""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.all]

SCRIPT = """
import os
import signal
import subprocess
import psutil
from prefect import get_client
from prefect_rlhf.flows.training.server import check_server
popen = subprocess.Popen
check_server()
assert subprocess.Popen is popen
assert psutil.Process().children(), "no server was started"
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.killpg(0, signal.SIGINT)  # as a terminal does
with get_client(sync_client=True) as client:
    print("answers:", client.api_healthcheck() is None)
"""


def test_ctrl_c_at_a_terminal_leaves_the_temporary_server_to_the_run(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path)}
    started = [sys.executable, "-c", SCRIPT]
    ended = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=240, process_group=0)
    assert "answers: True" in ended.stdout, ended.stderr[-2000:]


KILLED = """
import os
import signal
import psutil
from prefect_rlhf.flows.training.server import server_beside
with server_beside() as check_server:
    check_server()
print([child.pid for child in psutil.Process().children(recursive=True)], flush=True)
signal.pause()
"""


def test_a_killed_run_leaves_no_server(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    servers = json.loads(run.stdout.readline())
    assert servers and all(psutil.pid_exists(pid) for pid in servers)
    run.send_signal(signal.SIGKILL)
    run.wait(30)
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, servers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(psutil.pid_exists, servers))


MISTAKEN = """
import os
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
    environment |= {"PREFECT_HOME": str(tmp_path)}
    started = [sys.executable, "-c", MISTAKEN]
    ended = subprocess.run(started, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "refused\n")
    assert "Traceback" not in ended.stderr and "Fatal" not in ended.stderr
