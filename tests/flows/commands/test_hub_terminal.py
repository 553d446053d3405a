"""What a person sees of a download: two lines and a bar on the terminal, and no bar in the log."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

from tests.support.hub_stand_in import stand_in, variables

PROGRAM = """
import sys
from pathlib import Path
from prefect_rlhf.files.hub import progress
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.flows.algorithm.terminal import quiet_terminal
from prefect_rlhf.flows.training.log import kept_lines, log_info, log_now

progress.LONG_BYTES = 1000
with quiet_terminal(Path(sys.argv[1])), kept_lines():
    print("noise")
    log_info("kept for later")
    model_folder("acme/large", "actor.path", say=log_now)
"""


def test_a_download_before_the_run_shows_on_a_quiet_terminal(tmp_path):
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    with stand_in() as hub:
        hub.add("acme/large", {"config.json": b"{}", "model.safetensors": bytes(300_000)})
        environment = {**os.environ, **variables(hub, tmp_path / "hf"), "HOME": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run.log")]
        subprocess.run(command, env=environment, stdout=terminal, stderr=terminal, check=True, timeout=120)
    os.close(terminal)
    shown = os.read(screen, 1 << 16).decode()
    os.close(screen)
    assert "actor.path: downloads acme/large into " in shown
    assert "actor.path: acme/large: 100%" in shown
    assert "actor.path: downloaded acme/large in " in shown
    assert "noise" not in shown and "kept for later" not in shown
    log = (tmp_path / "run.log").read_text()
    assert "actor.path: downloads acme/large into " in log and "%|" not in log
