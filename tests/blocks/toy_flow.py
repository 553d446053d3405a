"""A flow that behaves badly in the ways that training flows do: it fails, and starts processes that will not end."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from prefect import flow, task
from prefect.client.orchestration import get_client
from prefect.exceptions import Pause
from prefect.runtime import flow_run

from prefect_rlhf.errors.errors import InvalidInput, RankLost, RlhfError
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.tasks.server.failures import failed

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
FAILURES: dict[str, Exception] = {
    "mistake": InvalidInput("steps", 0, "at least 1"),
    "lost": RankLost("rank 1 was killed by SIGKILL"),
    "bug": ZeroDivisionError("division by zero"),
}


@task
def wait(seconds: float) -> None:
    """One task run."""
    time.sleep(seconds)


@flow
def group(steps: int, seconds: float, failure: str = "") -> None:
    """Task runs one after the other, all submitted at once, so that most are Pending."""
    last = None
    for _ in range(steps):
        last = wait.submit(seconds, wait_for=[last] if last else None)
    if failure:
        raise FAILURES[failure]
    if last:
        last.result()


@flow(name="rlhf")
def toy(
    out: str,
    steps: int = 1,
    seconds: float = 0.1,
    dry_run: bool = False,
    failure: str = "",
    failures: int = 1,
    suspended: bool = False,
    quick_again: bool = False,
) -> Any:
    """Write down the lease, start a process in a session of its own that ignores SIGTERM, then take time.

    The first `failures` attempts fail; with `suspended` the first waits until it is suspended and stops a step later;
    with `quick_again` those after the first take no time.
    """
    lease = Lease.from_environment(os.environ)
    assert lease is not None
    attempt = attempts(out) + 1
    Path(out).write_text(lease.to_json())
    Path(f"{out}.attempts").write_text(str(attempt))
    if not dry_run:
        subprocess.Popen([sys.executable, "-c", STUBBORN], start_new_session=True)
    if suspended and attempt == 1:
        stop_when_suspended(seconds)
    try:
        group(steps, seconds if attempt == 1 or not quick_again else 0.1, failure if attempt <= failures else "")
    except RlhfError as error:
        return failed(error)
    return None


def attempts(out: str) -> int:
    """How often a run that writes to `out` has begun."""
    written = Path(f"{out}.attempts")
    return int(written.read_text()) if written.exists() else 0


def stop_when_suspended(seconds: float) -> None:
    """Do what a training run does: notice, finish the step, and end."""
    with get_client(sync_client=True) as client:
        while (state := client.read_flow_run(flow_run.id).state) and not state.is_paused():
            time.sleep(0.2)
    time.sleep(seconds)
    raise Pause(state=state)
