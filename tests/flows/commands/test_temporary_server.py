"""A run without a Prefect server of its own has a temporary one, which Ctrl-C at a terminal does not end before it."""

import os
import subprocess
import sys

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
