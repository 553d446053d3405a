"""The tracker for Weights & Biases: online if WANDB_MODE or a key says so, else into `wandb` in the run folder."""

import netrc
import os
import shutil
from hashlib import blake2b
from types import SimpleNamespace
from typing import Literal, final

import wandb
from wandb.sdk.lib.service import service_process

from prefect_rlhf.files.processes.environment import is_shown
from prefect_rlhf.tasks.trackers.tracker import TrackedRun, TrackedStep

FOLDER = "wandb"
KEY = "WANDB_API_KEY"
_PASSED = ("WANDB_", "XDG_", "SSL_", "REQUESTS_CA", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_", "https_", "no_")
"""Variables that W&B's own process gets: how their names begin."""
HOST = "api.wandb.ai"
FINISH_SECONDS = 15.0  # for unsent data at the end; less than a run waits for its trackers
INIT_SECONDS = 30.0  # for W&B's answer at the start; a process that ends earlier waits for the rest of this time


@final
class WandB:
    """A run of a project. Its id is derived from the folder, so a resumed run replaces its first part."""

    def __init__(self, run: TrackedRun) -> None:
        shutil.rmtree(run.run_dir / FOLDER, ignore_errors=True)
        settings = wandb.Settings(
            console="off",
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
        )
        _start_without_credentials()
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=blake2b(str(run.run_dir.resolve()).encode(), digest_size=8).hexdigest(),
            dir=run.run_dir,
            config=dict(run.parameters),
            mode=mode(),
            settings=settings,
            reinit="create_new",
        )

    def add(self, step: TrackedStep) -> None:
        """Log a step's metrics and samples."""
        tables = {
            f"samples/{folder}": wandb.Table(columns=list(table.columns), data=[list(row) for row in table.rows])
            for folder, table in step.samples.items()
        }
        self._run.log({**step.values, **tables}, step=step.step)

    def close(self, *, has_failed: bool) -> None:
        """Send or write the remaining data."""
        self._run.finish(exit_code=int(has_failed))


def _start_without_credentials() -> None:
    """Let W&B's own process start with few variables, since tools of plays can read them.

    The key reaches it through the settings of the run.
    """
    passed = {name: value for name, value in os.environ.items() if name.startswith(_PASSED) or is_shown(name)}
    passed.pop(KEY, None)
    service_process.os = SimpleNamespace(environ=passed, getpid=os.getpid)


def mode() -> Literal["online", "offline", "disabled", "shared"]:
    """Return WANDB_MODE; by default online if a key exists, else offline (W&B would prompt for a key)."""
    match os.environ.get("WANDB_MODE"):
        case "online" | "offline" | "disabled" | "shared" as said:
            return said
    return "online" if os.environ.get(KEY) or _has_login() else "offline"


def _has_login() -> bool:
    try:
        return netrc.netrc().authenticators(HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
