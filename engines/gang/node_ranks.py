"""The rank processes of one node: their fork server, the pipe that ends them, and the reports of their deaths."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prefect_rlhf.engines.gang.fork_server import ForkServerSettings
from prefect_rlhf.engines.gang.messages import ProcessSettings
from prefect_rlhf.engines.gang.own_folder import make_own_folder
from prefect_rlhf.placement.remote_path import cache_folder

CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """A fork server and its ranks, with a temporary folder. Closing `lifeline` ends them too, so they end with the
    process that holds it."""

    fork_server: subprocess.Popen[bytes]
    lifeline: int
    folder: Path

    @classmethod
    def start(
        cls,
        settings: ProcessSettings,
        pipes: Sequence[Sequence[int]],
        deaths: int,
        listener: int | None,
        environment: Mapping[str, str],
        python_path: Iterable[str] = (),
    ) -> NodeRanks:
        """Start a rank for each of `pipes`, which are its ends of one pipe for each resource of its device.

        Deaths are reported on `deaths`. Modules are found where this process finds them, then on `python_path`. The
        first rank serves the world's store on `listener`, where there is one.
        """
        folder, held = make_own_folder()
        lifeline_end, lifeline = os.pipe()
        server = ForkServerSettings(
            settings.method,
            lifeline_end,
            deaths,
            listener,
            tuple(map(tuple, pipes)),
            settings.preload,
            str(folder),
            held,
        )
        paths = dict.fromkeys(str(Path(path).absolute()) for path in (*sys.path, *python_path))
        fork_server = subprocess.Popen(
            server.command(),
            env={
                "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "torchinductor"),  # of all runs, so not in their folder
                **environment,
                **settings.environment,
                "PYTHONPATH": os.pathsep.join(paths),
                "TMPDIR": str(folder),
            },
            pass_fds=server.descriptors,
            stdin=subprocess.DEVNULL,
            process_group=0,  # a terminal's Ctrl-C is for the controller alone
        )
        os.close(lifeline_end)
        os.close(held)
        return cls(fork_server, lifeline, folder)

    def kill(self) -> None:
        """End every process: SIGTERM lets the fork server kill and reap its ranks; failing that, kill the group."""
        self.fork_server.terminate()
        try:
            self.fork_server.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.fork_server.pid, signal.SIGKILL)
            self.fork_server.wait(CLOSE_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lifeline)


@dataclass(frozen=True, slots=True)
class Deaths:
    """What a fork server reports on `reports`: the status of each of its ranks that is dead, counted from 0."""

    reports: int
    statuses: dict[int, int] = field(default_factory=dict)

    def how_it_died(self, rank: int) -> str:
        """Say `was killed by SIGKILL` or `ended with status 1`; `was lost` where there is no report."""
        try:
            self._read_until(rank)
        except OSError:
            return "was lost with its node"
        if rank not in self.statuses:
            return "was lost"
        status = os.waitstatus_to_exitcode(self.statuses[rank])
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def _read_until(self, rank: int) -> None:
        while rank not in self.statuses and select.select([self.reports], [], [], 1.0)[0]:
            report = os.read(self.reports, 4096)
            if not report:  # the fork server is gone
                return
            self.statuses.update({death["rank"]: death["status"] for death in map(json.loads, report.splitlines())})
