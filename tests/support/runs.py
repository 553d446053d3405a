"""Whole runs in tests: plan files and leases, how a run is started, and what its folder contains."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml
from prefect.settings import get_current_settings
from prefect.states import State
from safetensors.torch import load_file

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.training.run import PreparedRun, prepare
from prefect_rlhf.flows.training.spec.run_spec import asked_run
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh

Compact = Mapping[str, str]
"""Call -> `devices engine degrees`, e.g. `0-1 megatron dp2 micro_batches=2`; see `plan_file`."""

COMPUTATIONS = ("kl_penalised_rewards", "gae", "record_rollouts", "record_evaluation")
"""Those of PPO."""

COMPARED = (".loss", ".grad_norm", ".initial_loss", ".kept_rows")
"""Ends of the names of metrics that no plan changes."""


def end(flow: AlgorithmFlow, given: Mapping[str, Any]) -> State:
    """Run a flow to its end; return its final state."""
    return flow(**flow.validate_parameters(dict(given)), return_state=True)


def completed(flow: AlgorithmFlow, given: Mapping[str, Any]) -> Path:
    """Run a flow, which must complete; return the run's folder."""
    return folder_of(end(flow, given))


def folder_of(state: State) -> Path:
    """Return the folder of a run that must have completed."""
    assert state.is_completed(), state.message
    return Path(state.result()["run_dir"])


def prepared(flow: AlgorithmFlow, given: Mapping[str, Any], lease: Lease) -> PreparedRun:
    """Return what a run decides before it uses a device."""
    return prepare(asked_run(flow.algorithm, flow.validate_parameters(dict(given))), lease)


def whole(cluster: ClusterShape, kind: str = "cpu") -> Lease:
    """Return a lease of all devices of a cluster."""
    return Lease("pool", "abc", cluster, cluster.whole, cluster.whole.devices(), kind)


def read_lines(file: Path) -> list[Any]:
    """Return the values of a file that has a JSON value in each line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def rollouts(run_dir: Path, column: str = "tokens") -> list[Any]:
    """Return a column of what a run recorded, by step."""
    return [pq.read_table(file).column(column).to_pylist() for file in sorted((run_dir / "rollouts").glob("*.parquet"))]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a process whose runs go to the server of this one."""
    return {**os.environ, "PREFECT_API_URL": get_current_settings().api.url or "", **more}


def wait_for(find: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 240) -> Any:
    """Return what `find` gives once it gives something; fail if the process ends before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := find():
            return found
        assert process.poll() is None, process.stdout and process.stdout.read()[-2000:]
        time.sleep(0.02)
    raise AssertionError("it never happened")


@dataclass(frozen=True, slots=True)
class Result:
    """What a run made: columns of its rollouts and metrics by step, final weights by role, spans of its nodes."""

    row_ids: list[list[int]]
    tokens: list[list[list[int]]]
    logprobs: list[list[list[float]]]
    metrics: list[Mapping[str, float]]
    weights: Mapping[str, Mapping[str, Any]]
    spans: list[Mapping[str, Any]]
    run_dir: Path

    @classmethod
    def of(cls, state: State) -> Result:
        """From the final state of a run that must have completed."""
        return cls.read(folder_of(state))

    @classmethod
    def read(cls, run_dir: Path) -> Result:
        """From a run's folder."""
        weights: dict[str, dict[str, Any]] = {}
        for file in run_dir.glob("*/*.safetensors"):
            weights.setdefault(file.parent.name, {}).update(load_file(file))
        columns = (rollouts(run_dir, column) for column in ("row_id", "tokens", "logprobs"))
        return cls(
            *columns, read_lines(run_dir / "metrics.jsonl"), weights, read_lines(run_dir / "task_runs.jsonl"), run_dir
        )


def loss_difference(one: Result, other: Result) -> float:
    """The largest difference of any step's losses and gradient norms, relative to their size where that is over 1."""
    return max(
        abs(value - b[name]) / max(1.0, abs(value))
        for a, b in zip(one.metrics, other.metrics, strict=True)
        for name, value in a.items()
        if name.endswith(COMPARED)
    )


def weight_difference(one: Result, other: Result) -> float:
    """The largest difference of any element of the final weights."""
    return max(
        float((values - other.weights[role][name]).abs().max())
        for role, weights in one.weights.items()
        for name, values in weights.items()
    )


def first_differences(one: Result, other: Result) -> list[tuple[int, int, int, float]]:
    """(step, row, position, difference of log-probabilities there) where a row's tokens first differ.

    Only of the first step with any: what follows was trained on other tokens.
    """
    for step, (left, right) in enumerate(zip(one.tokens, other.tokens, strict=True)):
        found = []
        for row, (a, b) in enumerate(zip(left, right, strict=True)):
            position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if position is not None or len(a) != len(b):
                place = min(len(a), len(b)) if position is None else position
                at = place - (len(a) - len(one.logprobs[step][row]))
                found.append((step, row, place, abs(one.logprobs[step][row][at] - other.logprobs[step][row][at])))
        if found:
            return found
    return []


def plan_file(compact: Compact, path: Path, computations: Sequence[str] = COMPUTATIONS, per_node: int = 8) -> Path:
    """Write a plan as a plan file; its devices count through nodes that have `per_node` each."""
    calls: dict[str, dict[str, Any]] = {}
    for call, text in compact.items():
        devices, *words = text.split()
        entry = calls[call] = {"mesh": _mesh(devices, per_node).name}
        for word in words:
            if "=" in word:
                key, _, value = word.partition("=")
                entry[key] = yaml.safe_load(value)
            else:
                entry[word[:2]] = int(word[2:])
    calls |= {name: {"mesh": "n0:0", "engine": "python"} for name in computations}
    path.write_text(json.dumps({"name": path.stem, "calls": calls}))
    return path


def _mesh(devices: str, per_node: int) -> DeviceMesh:
    first, _, last = devices.partition("-")
    (node, begin), (last_node, end) = divmod(int(first), per_node), divmod(int(last or first), per_node)
    return DeviceMesh(node, last_node - node + 1, begin, end - begin + 1)


def num_devices(compact: Compact) -> int:
    """Return the number of devices up to the last one that a plan uses."""
    return 1 + max(int(words.split()[0].rpartition("-")[2]) for words in compact.values())


@contextmanager
def leased(
    count: int, nodes: int = 1, kinds: Sequence[Mapping[str, Any]] = (), memory_bytes: int | None = None
) -> Iterator[None]:
    """As the worker does: the environment says which devices this process may use, of which kinds of nodes.

    Each device has the memory of a `Cluster`, or `memory_bytes`.
    """
    of_kinds = {"node_kinds": kinds} if kinds else {"num_nodes": nodes}
    cluster = Cluster(cluster="matrix", devices_per_node=count // nodes, **of_kinds).shape
    if memory_bytes is not None:
        cluster = replace(cluster, device_memory_bytes=memory_bytes)
    lease = Lease("matrix", "test", cluster, cluster.whole, cluster.whole.devices())
    before = os.environ.get(ENVIRONMENT_VARIABLE)
    os.environ[ENVIRONMENT_VARIABLE] = lease.to_json()
    try:
        yield
    finally:
        os.environ.pop(ENVIRONMENT_VARIABLE)
        if before is not None:
            os.environ[ENVIRONMENT_VARIABLE] = before
