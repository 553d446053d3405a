"""A real Prefect server with a gpu-mesh pool, deployments of the toy flow and a worker, all in a temporary folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.support.migrated_database import put_database

PREFECT = Path(sys.executable).with_name("prefect")
DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "whole": {"mesh": "n0:0-1"},
    "half": {"num_devices": 1},
    "outside": {"mesh": "n0:0-7"},
    "wide": {"cluster": "wide", "devices_per_node": 8, "num_devices": 1},
}
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}


class PrefectSite:
    """Commands and looks at one server. Every wait has a limit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = os.environ | {
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_CLI_PROMPT": "false",
        }

    def start_server(self) -> None:
        put_database(self.folder / "home")
        self._start("server", "server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        self.until(self._is_healthy, 90)

    def start_worker(self) -> None:
        """Start one as a script does with `&`, which leaves it SIGINT ignored."""
        self._start("worker", "worker", "start", "--pool", "mesh", "--name", "tester", ignored=signal.SIGINT)
        self.until(lambda: b"started!" in (self.folder / "worker.log").read_bytes(), 60)

    def deploy(self) -> None:
        """Write a prefect.yaml of the toy flow, as a user would, and deploy it."""
        shutil.copy(Path(__file__).with_name("toy_flow.py"), self.folder / "toy_flow.py")
        common = {"cluster": "toy", "lease_directory": str(self.folder / "leases"), "grace_seconds": 2}
        deployments = [
            {
                "name": name,
                "entrypoint": "toy_flow.py:toy",
                "work_pool": {"name": "mesh", "job_variables": common | extra},
                "parameters": {"out": str(self.folder / f"{name}.json")},
                "enforce_parameter_schema": True,
            }
            for name, extra in DEPLOYMENTS.items()
        ]
        (self.folder / "prefect.yaml").write_text(json.dumps({"name": "toy", "deployments": deployments}))
        self.prefect("work-pool", "create", "mesh", "--type", "gpu-mesh")
        self.prefect("deploy", "--all")

    def prefect(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run the command line, in the site's folder or another; returns its output."""
        command, cwd = [str(PREFECT), *arguments], cwd or self.folder
        done = subprocess.run(
            command, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def run(self, deployment: str, job_variables: dict[str, Any] | None = None, **parameters: Any) -> str:
        """Ask for a flow run; returns its id."""
        found = self.ask(f"/deployments/name/rlhf/{deployment}")
        asked = {"parameters": parameters, "job_variables": job_variables or {}}
        return self.ask(f"/deployments/{found['id']}/create_flow_run", asked)["id"]

    def set_state(self, run: str, state: dict[str, Any], force: bool = False) -> None:
        """Do as the buttons of the UI do."""
        self.ask(f"/flow_runs/{run}/set_state", {"state": state, "force": force})

    def states(self, run: str) -> list[str]:
        """Names of all states that the run has had, in order."""
        history = self.ask(f"/flow_run_states/?flow_run_id={run}")
        return [state["name"] for state in sorted(history, key=lambda state: state["timestamp"])]

    def logged(self, run: str) -> str:
        """All that the run has in its log."""
        lines = self.ask("/logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
        return "\n".join(line["message"] for line in lines)

    def state(self, run: str) -> dict[str, Any]:
        return self.ask(f"/flow_runs/{run}")["state"]

    def until_state(self, run: str, wanted: str, seconds: float = 60) -> dict[str, Any]:
        """Wait for a state type or name; fails at once on another final state."""

        def reached() -> bool:
            state = self.state(run)
            assert state["type"] not in FINAL - {wanted}, f"{state}\n{self.logged(run)}\n{self.log()[-3000:]}"
            return wanted in (state["type"], state["name"])

        self.until(reached, seconds)
        return self.state(run)

    def unfinished_tasks(self) -> list[str]:
        """Names of all task runs that have no final state."""
        task_runs = self.ask("/task_runs/filter", {"limit": 200})
        return [run["name"] for run in task_runs if run["state_type"] not in FINAL]

    def left_of(self, run: str) -> list[int]:
        """Processes that carry the run's id."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if f"PREFECT__FLOW_RUN_ID={run}".encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
        return found

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.api + path, data, {"content-type": "application/json"})
        deadline = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > deadline:  # 503: its database is locked for a moment
                    raise
            time.sleep(0.5)

    def until(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait for `condition`; returns the seconds it took."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, self.log()[-3000:]
            time.sleep(0.2)
        return time.monotonic() - start

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self.folder.glob("worker.log"))

    def signal_worker(self, number: int) -> None:
        """Signal the worker's own process and wait until it is gone."""
        worker = self.processes.pop("worker")
        worker.send_signal(number)
        worker.wait(30)

    def close(self) -> None:
        for name in ("worker", "server"):
            self.end_process(name)

    def end_process(self, name: str) -> None:
        """End a process of the site, and those that it started; nothing if it is not there."""
        if process := self.processes.pop(name, None):
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)

    def _start(self, name: str, *arguments: str, ignored: signal.Signals | None = None) -> None:
        self.start_process(name, [str(PREFECT), *arguments], ignored)

    def start_process(self, name: str, command: list[str], ignored: signal.Signals | None = None) -> None:
        """Start a process of the site, which writes to `name`.log."""

        def ignore() -> None:
            if ignored is not None:
                signal.signal(ignored, signal.SIG_IGN)

        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command,
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=ignore,
            )

    def _is_healthy(self) -> bool:
        try:
            return bool(self.ask("/health"))
        except (urllib.error.URLError, OSError):
            return False


AnySite = TypeVar("AnySite", bound=PrefectSite)


def prefect_site(folder: Path) -> AbstractContextManager[PrefectSite]:
    """Return the site of `folder`, up while the body runs."""
    return everything_up(PrefectSite(folder))


@contextmanager
def everything_up(site: AnySite) -> Iterator[AnySite]:
    """Start server, deployments and worker of a site; whatever happens, everything is down again."""
    site.temporary.mkdir()
    site.environment["TMPDIR"] = str(site.temporary)
    try:
        site.start_server()
        site.deploy()
        site.start_worker()
        yield site
    finally:
        site.close()
