"""The tracker for Weights & Biases: online where WANDB_MODE or a key says so, else into `wandb` of the run's folder."""

from __future__ import annotations

import netrc
import os
import shutil
from hashlib import blake2b
from typing import Literal, final

import wandb

from prefect_rlhf.tasks.trackers.tracker import TrackedRun, TrackedStep

FOLDER = "wandb"
HOST = "api.wandb.ai"
FINISH_SECONDS = 15.0  # for what is not sent at the end; less than a run waits for its trackers
INIT_SECONDS = 30.0  # for W&B to answer at the start; a process that ends before stays for the rest of it


@final
class WandB:
    """One run of a project. Its id follows from the folder: a run that goes on takes the place of its first part."""

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
        """Send or write what is left."""
        self._run.finish(exit_code=int(has_failed))


def mode() -> Literal["online", "offline", "disabled", "shared"]:
    """Return what WANDB_MODE says; else online where there is a key, and offline where W&B would ask for one."""
    match os.environ.get("WANDB_MODE"):
        case "online" | "offline" | "disabled" | "shared" as said:
            return said
    return "online" if os.environ.get("WANDB_API_KEY") or _has_login() else "offline"


def _has_login() -> bool:
    try:
        return netrc.netrc().authenticators(HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
