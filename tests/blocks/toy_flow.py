"""A flow that behaves badly in the ways that training flows do: it starts processes that do not want to end."""

import subprocess
import sys
import time
from pathlib import Path

from prefect import flow, task

from prefect_rlhf.placement.lease import Lease

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@task
def wait(seconds: float) -> None:
    """One task run."""
    time.sleep(seconds)


@flow
def group(steps: int, seconds: float) -> None:
    """Task runs one after the other, all submitted at once, so that most are Pending."""
    last = None
    for _ in range(steps):
        last = wait.submit(seconds, wait_for=[last] if last else None)
    if last:
        last.result()


@flow(name="rlhf")
def toy(out: str, steps: int = 1, seconds: float = 0.1, dry_run: bool = False) -> None:
    """Write down the lease, start a process in a session of its own that ignores SIGTERM, then take time."""
    lease = Lease.from_environment()
    assert lease is not None
    Path(out).write_text(lease.to_json())
    if not dry_run:
        subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    group(steps, seconds)
