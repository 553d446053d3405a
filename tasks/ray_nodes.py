"""Nodes of a Ray cluster for runs on several machines: starts a node by hand, stops it, lists all nodes."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.gang.ray.ray_gang import HEAD_AWAY, join_cluster
from prefect_rlhf.engines.gang.ray.ray_places import DEVICE_LABEL
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.placement.devices.mesh import Backend

START_SECONDS = 120


@dataclass(frozen=True, slots=True)
class KnownNode:
    """A node that Ray lists: its address, whether it answers, its devices, and their kind if stated."""

    address: str
    alive: bool
    cpus: int
    gpus: int
    device: str = ""

    def has(self, backend: Backend) -> int:
        """Return how many devices with this backend it has."""
        return self.cpus if backend == "cpu" else self.gpus

    def __str__(self) -> str:
        has = f"{self.cpus} CPUs, {self.gpus} GPUs" + (f", {self.device}" if self.device else "")
        return f"{self.address}: {has if self.alive else 'unreachable'}"


@dataclass(frozen=True, slots=True)
class Devices:
    """A node's devices for runs: number, backend, and the name of their kind if other nodes differ."""

    count: int
    backend: Backend
    name: str = ""

    @property
    def flags(self) -> Sequence[str]:
        """The arguments for Ray's command."""
        resource = "cpus" if self.backend == "cpu" else "gpus"
        return [f"--num-{resource}={self.count}", *([f"--labels={DEVICE_LABEL}={self.name}"] if self.name else [])]


def known_nodes(address: str | None = None) -> tuple[KnownNode, ...]:
    """Return the nodes of the cluster at `address` (default: RAY_ADDRESS). Raises InvalidInput without a cluster."""
    join_cluster(address or os.environ.get("RAY_ADDRESS", "auto"))
    import ray  # only here: most runs do not need Ray

    def known(node: Mapping[str, Any]) -> KnownNode:
        cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
        return KnownNode(node["NodeManagerAddress"], node["Alive"], cpus, gpus, node["Labels"].get(DEVICE_LABEL, ""))

    return tuple(sorted(map(known, ray.nodes()), key=lambda node: node.address))


def start_head(address: str, port: int, has: Devices) -> str:
    """Start a cluster's first node on this machine, reachable at `address`; return the address for joining it.

    Raises InvalidInput for an address of another machine and for a port in use.
    """
    try:
        socket.create_server((address, port)).close()
    except OSError as error:
        expected = f"an address of this machine and a free port of it ({error.strerror})"
        raise InvalidInput("--head", f"{address}:{port}", expected) from error
    _ray("start", "--head", f"--node-ip-address={address}", f"--port={port}", *has.flags)
    return f"{address}:{port}"


def start_node(head: str, address: str | None, has: Devices) -> None:
    """Add this machine to the cluster whose head is at `head`. Raises InvalidInput if the head does not answer."""
    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        raise InvalidInput("--join", head, f"HOST:PORT of a head that answers ({error})") from error
    own = () if address is None else (f"--node-ip-address={address}",)
    _ray("start", f"--address={head}", *own, *has.flags)


def stop_node() -> None:
    """Stop all of Ray's processes on this machine."""
    _ray("stop")


def _ray(*words: str) -> None:
    """Run Ray's command. Raises InvalidInput if it is not installed, RlhfError with its last line of output."""
    command = Path(sys.executable).with_name("ray")
    if not command.exists():
        raise InvalidInput("nodes", "no Ray in this environment", install_command("ray"))
    own = {**HEAD_AWAY, **os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        ended = subprocess.run([command, *words], env=own, capture_output=True, text=True, timeout=START_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise RlhfError(f"ray {words[0]} did not answer within {START_SECONDS} s") from error
    if ended.returncode:
        said = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        raise RlhfError(f"ray {words[0]} ended with status {ended.returncode}: {said[-1] if said else 'no output'}")
