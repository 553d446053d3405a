"""The machine of `chaos.py`: a Prefect server, a worker and one PPO deployment on two CPU devices, to be done harm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.blocks.prefect_site import FINAL, PrefectSite
from tests.support import plan_matrix, ray_nodes
from tests.support.plan_matrix import plan
from tests.support.ray_nodes import RayNodes
from tests.support.runs import plan_file

PLAN = plan("0-1 dp2 engine=megatron", "0", "1", "0-1 dp2", "0-1 dp2", "0-1 dp2 micro_batches=2")
OPEN = ("PENDING", "RUNNING", "CANCELLING", "PAUSED", "SCHEDULED")
RESTARTS = 5
DEADLINE_SECONDS = 20.0  # of a call: a frozen rank is found out after that


class ChaosSite(PrefectSite):
    """Commands and looks at one server whose deployment `chaos` trains tiny models with PPO on two devices.

    They are of this machine, or of two of `nodes`.
    """

    def __init__(self, folder: Path, output_dir: Path, steps: int, nodes: RayNodes | None = None) -> None:
        super().__init__(folder)
        self.output_dir, self.steps, self.nodes = output_dir, steps, nodes
        self.environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if nodes is not None:
            self.environment |= ray_nodes.ENVIRONMENT | {"RAY_ADDRESS": nodes.address}

    def deploy(self) -> None:
        """Deploy `rlhf/chaos`, which goes on by itself after a failure, from checkpoints after every step."""
        given = plan_matrix.parameters(self.folder / "models")
        given |= {
            "steps": self.steps,
            "checkpoint_every": 1,
            "steps_per_group": 2,
            "output_dir": str(self.output_dir),
            "plan": str(plan_file(PLAN, self.folder / "plan.json", per_node=2 if self.nodes is None else 1)),
            "call_deadline_seconds": DEADLINE_SECONDS,
        }
        variables = {
            "cluster": "chaos",
            **({"devices_per_node": 2} if self.nodes is None else {"num_nodes": 2, "devices_per_node": 1}),
            "num_devices": 2,
            "lease_directory": str(self.folder / "leases"),
            "grace_seconds": 20,
            "max_restarts": RESTARTS,
            "stream_output": True,
        }
        deployment = {
            "name": "chaos",
            "entrypoint": "prefect_rlhf.flows.ppo:ppo",
            "work_pool": {"name": "mesh", "job_variables": variables},
            "parameters": given,
        }
        (self.folder / "prefect.yaml").write_text(json.dumps({"name": "chaos", "deployments": [deployment]}))
        self.prefect("work-pool", "create", "mesh", "--type", "gpu-mesh")
        self.prefect("deploy", "--all")

    def kill(self, name: str) -> None:
        """Kill the server or the worker, with SIGKILL, and nothing beside it."""
        process = self.processes.pop(name)
        process.kill()
        process.wait(10)

    def resume(self, run: str) -> None:
        self.ask(f"/flow_runs/{run}/resume", {})

    def run_dir(self, run: str) -> Path:
        return self.output_dir / str(self.ask(f"/flow_runs/{run}")["name"])

    def lines(self, run_dir: Path, file: str) -> int:
        """Return the lines of a file of a run's folder so far."""
        path = run_dir / file
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def processes_of(self, run: str) -> Mapping[str, list[int]]:
        """Return the processes of a run by what they are, ranks in the order of their ids."""
        found: dict[str, list[int]] = {"keeper": [], "controller": [], "fork server": [], "rank": []}
        parents = {pid: _parent(pid) for pid in self.left_of(run)}
        keepers = [pid for pid in parents if any(word.endswith("keeper.py") for word in _command(pid))]
        servers = [pid for pid in parents if _is_fork_server(pid) and not _is_fork_server(parents[pid])]
        for pid, parent in sorted(parents.items()):
            if pid in keepers:
                found["keeper"].append(pid)
            elif pid in servers:
                found["fork server"].append(pid)
            elif parent in servers:
                found["rank"].append(pid)
            elif parent in keepers:
                found["controller"].append(pid)
        return found

    def open_runs(self, run: str) -> list[str]:
        """Return names of task runs and subflow runs, below a run, that have no final state."""
        parent = {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "limit": 200}
        groups = self.ask("/flow_runs/filter", parent)
        task_runs = self._pages("/task_runs/filter", parent)
        own = self._pages("/task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
        return [each["name"] for each in [*groups, *task_runs, *own] if each["state_type"] in OPEN]

    def finished_calls(self, run: str, title: str) -> int:
        """Return how many task runs whose names begin with `title` completed, over all attempts at a run."""
        body = {
            "flow_runs": {"parent_flow_run_id": {"any_": [run]}},
            "task_runs": {"name": {"like_": title}, "state": {"type": {"any_": ["COMPLETED"]}}},
        }
        return sum(row["name"].startswith(title) for row in self._pages("/task_runs/filter", body))

    def is_final(self, run: str) -> bool:
        return self.state(run)["type"] in FINAL

    def _pages(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        rows: list[Any] = []
        while page := self.ask(path, {**body, "limit": 200, "offset": len(rows)}):
            rows += page
        return rows


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _is_fork_server(pid: int) -> bool:
    return any("fork_server" in word for word in _command(pid))
