"""A Prefect server, work pool, worker and deployments for the demo, started with the commands that a user types."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo.processes import Daemon
from prefect_rlhf.errors.errors import RlhfError

POOL = "two-device-mesh"


class DemoFailed(RlhfError):
    """A command of the demo failed or timed out; the message names the command and the place of its output."""


@dataclass(frozen=True, slots=True)
class DemoServer:
    """Everything under `home`: Prefect's database, logs and process ids. `port` is the server's."""

    home: Path
    project: Path
    port: int = 4200

    @property
    def ui_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def daemons(self) -> tuple[Daemon, Daemon]:
        """Worker and server. They end in this order, because a worker reports to its server."""
        return Daemon("worker", self.home / "processes"), Daemon("server", self.home / "processes")

    def environment(self) -> dict[str, str]:
        """Return this process's environment with Prefect pointed at the demo's own server and database."""
        return os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PREFECT_HOME": str(self.home / "prefect"),
            "PREFECT_API_URL": f"{self.ui_url}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_CLI_PROMPT": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "2",
            "RLHF_HOME": str(self.home),
        }

    def start(self) -> None:
        """Start server, pool, worker and deployments; a running server or worker is kept."""
        worker, server = self.daemons
        if server.pid() is None:
            self._require_free_port()
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        server.start(["prefect", "server", "start", *address], self.environment())
        self._wait_until_healthy(server)
        self.prefect("work-pool", "create", POOL, "--type", "gpu-mesh", "--overwrite")
        worker.start(["prefect", "worker", "start", "--pool", POOL, "--name", "demo"], self.environment())
        self.prefect("deploy", "--all", "--pool", POOL)

    def stop(self) -> list[str]:
        """End the processes of `start`; returns the names of the running processes that it ended."""
        return [daemon.name for daemon in self.daemons if daemon.stop()]

    def prefect(self, *arguments: str, limit_seconds: float = 300.0) -> str:
        """Run `prefect ARGUMENTS` in the project; returns its output. Raises DemoFailed with the end of the output."""
        command = ["prefect", *arguments]
        try:
            done = subprocess.run(
                command,
                env=self.environment(),
                cwd=self.project,
                capture_output=True,
                text=True,
                timeout=limit_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DemoFailed(f"{' '.join(command)}: no end after {limit_seconds:.0f} s") from error
        if done.returncode:
            raise DemoFailed(f"{' '.join(command)}: exit {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
        return done.stdout

    def _wait_until_healthy(self, server: Daemon, limit_seconds: float = 180.0) -> None:
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.ui_url}/api/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
            if server.pid() is None:
                break
        raise DemoFailed(f"the Prefect server did not answer at {self.ui_url}; its output is in {server.log}")

    def _require_free_port(self) -> None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                raise DemoFailed(f"another program uses port {self.port}; choose another port: make demo PORT=4201")
