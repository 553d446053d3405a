"""A node's rank processes: their fork server, the pipe that ends them, and the reports of their deaths."""

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

from prefect_rlhf.engines.gang.processes.fork_server import ForkServerSettings
from prefect_rlhf.engines.gang.processes.messages import ProcessSettings
from prefect_rlhf.engines.gang.processes.own_folder import make_own_folder
from prefect_rlhf.files.processes.environment import handed_over
from prefect_rlhf.files.remote_path import cache_folder

CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class NodeRanks:
    """A fork server and its ranks, with a temporary folder.

    Closing `lifeline` ends them too, so they end with the process that holds it.
    """

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
        """Start a rank for each entry of `pipes`, which has the rank's ends of its pipes, a pipe per resource of its
        device.

        The fork server reports deaths on `deaths`. Ranks search this process's module path, then `python_path`. The
        first rank serves the world's store on `listener`, if it is given.
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
        variables = {
            "TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "torchinductor"),  # runs share it, so not in `folder`
            **environment,
            **settings.environment,
            "PYTHONPATH": os.pathsep.join(paths),
            "TMPDIR": str(folder),
        }
        with handed_over(server.command(), variables) as (command, at_start, hidden):
            fork_server = subprocess.Popen(
                command,
                env=at_start,
                pass_fds=(*server.descriptors, hidden),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a terminal's Ctrl-C must only reach the controller
            )
        os.close(lifeline_end)
        os.close(held)
        return cls(fork_server, lifeline, folder)

    def kill(self) -> None:
        """End every process: SIGTERM lets the fork server kill and reap its ranks; if that fails, the group is
        killed.
        """
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
    """A fork server's reports on `reports`: the wait status of each of its dead ranks, numbered from 0."""

    reports: int
    statuses: dict[int, int] = field(default_factory=dict)

    def how_it_died(self, rank: int) -> str:
        """Return `was killed by SIGKILL` or `ended with status 1`, or `was lost` without a report."""
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
            if not report:  # the fork server has ended
                return
            self.statuses.update({death["rank"]: death["status"] for death in map(json.loads, report.splitlines())})
