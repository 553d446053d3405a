"""Machines of a Ray cluster on this one: network namespaces behind a bridge, each with its own processes and memory.

The Ray head is on the bridge, without devices; so is the test. What an earlier test that was killed left is removed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unittest.mock import patch

from prefect_rlhf.engines.gang.ray.ray_gang import HEAD_AWAY
from prefect_rlhf.tasks.ray_nodes import Devices

ROOT = Path(__file__).parents[2]
RAY_ONLY = ("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED")
START_SECONDS = 120
OWN_MEMORY = 'mount -t tmpfs shm /dev/shm && exec "$0" "$@"'
ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
    **HEAD_AWAY,
}


@cache
def why_not() -> str:
    """Return why this machine can have no such nodes, or nothing."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return "network namespaces need root, ip and unshare"
    name = f"rp-{os.getpid()}"
    probe = _ip("netns", "add", name, check=False)
    _ip("netns", "del", name, check=False)
    if probe.returncode:
        return f"network namespaces cannot be made here: {probe.stderr.strip()}"
    try:
        import ray  # noqa: F401  # is it there?
    except ImportError:
        return "Ray is not installed"
    return ""


@dataclass
class RayNodes:
    """A cluster: `address` is its head's, `addresses` those of its nodes."""

    address: str
    addresses: list[str]
    names: list[str]
    devices: tuple[int, ...]
    folder: Path
    kinds: tuple[str, ...] = ()
    started: list[subprocess.Popen] = field(default_factory=list)

    def start(self) -> None:
        """Start Ray on the head and on each node."""
        head, _, port = self.address.partition(":")
        place = (f"--node-ip-address={head}", f"--port={port}")
        _start(self, [], "--head", *place, "--num-cpus=0", "--include-dashboard=false")
        _await(self, 0)
        kinds = self.kinds or ("",) * len(self.devices)
        for name, address, count, kind in zip(self.names, self.addresses, self.devices, kinds, strict=True):
            place = ["ip", "netns", "exec", name, "unshare", "--mount", "sh", "-c", OWN_MEMORY]
            has = Devices(count, "cpu", kind).flags
            _start(self, place, f"--address={self.address}", f"--node-ip-address={address}", *has)
        for started in range(1, len(self.devices) + 1):
            _await(self, started)

    def stop(self) -> None:
        """End every process of the head and of the nodes."""
        for node in range(len(self.names)):
            self.kill(node)
        self.kill_head()
        for started in self.started:
            started.wait()
        self.started.clear()

    def mend(self) -> None:
        """Undo what was done to links, and start Ray anew where some of it is gone."""
        for name in self.names:
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("netns", "exec", name, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        if any(started.poll() is not None for started in self.started):
            self.stop()
            self.start()

    def cut(self, node: int) -> None:
        """Pull a node's cable."""
        _ip("-n", self.names[node], "link", "set", "eth0", "down")

    def slow(self, node: int, rate: str) -> None:
        """Let a node send no faster than `rate`, as tc writes it: 2mbit."""
        shape = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        _ip("netns", "exec", self.names[node], "tc", "qdisc", "replace", "dev", "eth0", "root", *shape)

    def kill(self, node: int) -> None:
        """Switch a node off: every process of it ends at once."""
        for pid in _ip("netns", "pids", self.names[node], check=False).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)

    def kill_head(self) -> None:
        """End the head, at once."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if str(self.folder / "0") in (process / "cmdline").read_text():  # its --temp-dir
                    os.kill(int(process.name), 9)

    def block(self, node: int, address: str) -> None:
        """Let a node send nothing to an address."""
        _ip("-n", self.names[node], "route", "add", "blackhole", f"{address}/32")

    @contextmanager
    def another_address(self) -> Iterator[str]:
        """Give the machine of the test an address beside the head's, to be blocked by itself."""
        address = f"{self.address.partition(':')[0].rpartition('.')[0]}.253"
        _ip("addr", "add", f"{address}/24", "dev", f"rb{os.getpid()}")
        try:
            yield address
        finally:
            _ip("addr", "del", f"{address}/24", "dev", f"rb{os.getpid()}")

    def unblock(self, node: int, address: str) -> None:
        """Undo `block`."""
        _ip("-n", self.names[node], "route", "del", "blackhole", f"{address}/32")


@contextmanager
def ray_nodes(devices: Sequence[int] = (1, 1), kinds: Sequence[str] = ()) -> Iterator[RayNodes]:
    """Start a head, and a node with each of these numbers of devices, or kinds too; end all of it, whatever happens."""
    _remove_leftovers()
    own = os.getpid()
    subnet = f"10.{64 + own % 64}.{own // 64 % 256}"
    bridge, head = f"rb{own}", f"{subnet}.254"
    names = [f"rn{node}-{own}" for node in range(1, len(devices) + 1)]
    addresses = [f"{subnet}.{node}" for node in range(1, len(devices) + 1)]
    port = 20000 + own % 10000  # a head listens on all addresses of this machine, where another test may have one
    folder = Path(tempfile.mkdtemp(prefix="rn", dir="/tmp"))
    nodes = RayNodes(f"{head}:{port}", addresses, names, tuple(devices), folder, tuple(kinds))
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{head}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for node, (name, address) in enumerate(zip(names, addresses, strict=True), start=1):
            _ip("netns", "add", name)
            _ip("link", "add", f"rv{node}x{own}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"rv{node}x{own}", "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        nodes.start()
        yield nodes
    finally:
        nodes.stop()
        _remove(own)
        shutil.rmtree(nodes.folder, ignore_errors=True)


@contextmanager
def joined(nodes: RayNodes) -> Iterator[None]:
    """Let gangs of this process join the cluster; leave it afterwards, for a process has one at a time."""
    import ray

    with patch.dict(os.environ, {**{name: ENVIRONMENT[name] for name in RAY_ONLY}, "RAY_ADDRESS": nodes.address}):
        try:
            yield
        finally:
            ray.shutdown()


def _start(nodes: RayNodes, place: Sequence[str], *options: str) -> None:
    number = len(nodes.started)
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--object-store-memory=80000000"]
    with (nodes.folder / f"{number}.log").open("wb") as log:
        started = subprocess.Popen(
            [*place, *command, f"--temp-dir={nodes.folder / str(number)}", *options],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    nodes.started.append(started)


def _await(nodes: RayNodes, number: int) -> None:
    """Wait until a `ray start --block` says that it runs."""
    end = time.monotonic() + START_SECONDS
    while "Ray runtime started" not in (said := (nodes.folder / f"{number}.log").read_text()):
        assert nodes.started[number].poll() is None and time.monotonic() < end, said
        time.sleep(0.2)


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check)


def _remove(own: int) -> None:
    """Remove the namespaces and the bridge that process `own` made, and whatever runs there or holds the head."""
    for name in _namespaces():
        if name.endswith(f"-{own}"):
            for pid in _ip("netns", "pids", name).stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            _ip("netns", "del", name, check=False)
    _ip("link", "del", f"rb{own}", check=False)


def _remove_leftovers() -> None:
    for name in _namespaces():
        owner = name.rpartition("-")[2]
        if name.startswith("rn") and owner.isdigit() and not Path("/proc", owner).exists():
            _remove(int(owner))


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").stdout.splitlines() if line]
