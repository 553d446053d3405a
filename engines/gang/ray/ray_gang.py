"""A gang over several machines: Ray places an agent on each node; requests and replies go directly to the ranks.

Ray only provides the places. So a call costs as much as on one machine plus the network's latency, and the loss of a
node shows on its wires within seconds, before Ray reports it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from prefect_rlhf.engines.gang.local import message_pipe
from prefect_rlhf.engines.gang.process_gang import ProcessGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings, Start
from prefect_rlhf.engines.gang.processes.node_ranks import CLOSE_SECONDS, Deaths
from prefect_rlhf.engines.gang.protocol import AnyRank
from prefect_rlhf.engines.gang.ray.node_agent import CONTROL, versions
from prefect_rlhf.engines.gang.ray.ray_places import PLACE_SECONDS, Placed, places_of
from prefect_rlhf.engines.gang.ray.shared_folder import FIELD, SharedFolder
from prefect_rlhf.engines.gang.ray.wires import CONNECT_SECONDS, Address, Hello, reach
from prefect_rlhf.errors.errors import InvalidInput, RankLost
from prefect_rlhf.errors.install_command import install_command
from prefect_rlhf.files.gpus import QUERY_LIMIT_SECONDS, Gpu
from prefect_rlhf.placement.augmented.resources import RESOURCES, Resource

HEAD_AWAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": "604800"}
"""Ray ends every process, including the controller, after a minute without contact to the head; with this, after a
week."""
PASSED_ON = ("PREFECT", "RLHF", "HF_", "NCCL_", "GLOO_", "TORCH", "VLLM_", "AWS_", "GOOGLE_")
"""Prefixes of the controller's environment variables that ranks of other nodes receive too."""
MARKER_SECONDS = 3 * PLACE_SECONDS
"""Limit of writing and reading markers: a store that accepts connections may never answer."""


@final
class RayGang(ProcessGang[AnyRank]):
    """Rank processes on nodes of a Ray cluster, in one world of `torch.distributed` over the nodes' own interfaces.

    Ranks end within seconds after the controller ends or becomes unreachable, for any reason.
    """

    def __init__(
        self,
        settings: GangSettings[AnyRank],
        ranks_of_nodes: Sequence[int],
        address: str | None = None,
        say: Callable[[str], object] = print,
        shared: Path | None = None,
        node_devices: Sequence[str] = (),
    ) -> None:
        """Start the given number of ranks on each node, in order; `address` is Ray's, by default RAY_ADDRESS.

        `node_devices` are the kinds of device that the nodes need by their labels; without it any node qualifies.

        While others hold the nodes, `say` receives a line every minute. Raises InvalidInput for a cluster that does not
        answer, that is too small, or whose nodes differ, cannot reach each other or do not all share the folder
        `shared`; RankLost if a node is lost meanwhile.
        """
        cluster = address or os.environ.get("RAY_ADDRESS", "auto")
        own = join_cluster(cluster)
        places = places_of(ranks_of_nodes, settings.device, node_devices)
        placed = Placed.on(cluster, places, say)
        try:
            environment = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
            placed.ask("adopt", lambda node: (environment,))
            if shared is not None:
                _check_shared(placed, SharedFolder.of(shared))
            if settings.device == "cuda":
                _check_gpus(placed, ranks_of_nodes, node_devices or ("",) * len(ranks_of_nodes))
            processes, store = _launch(settings, ranks_of_nodes, placed, own)
        except BaseException:
            placed.release()
            raise
        devices = [device for count in ranks_of_nodes for device in range(count)]
        super().__init__(
            processes, {rank: Start(rank, device, *store, settings) for rank, device in enumerate(devices)}
        )


def join_cluster(address: str) -> str:
    """Join the Ray cluster at `address`; return the address that its nodes use for this machine.

    Raises InvalidInput if Ray is not installed or the cluster does not answer.
    """
    os.environ.update({name: value for name, value in HEAD_AWAY.items() if name not in os.environ})
    try:
        import ray
    except ImportError as error:
        raise InvalidInput("cluster", "several nodes", f"Ray on each: {install_command('ray')}") from error
    if not ray.is_initialized():
        host, _, port = address.rpartition(":")
        try:
            if port.isdigit():
                reach((host, int(port))).close()
            with _signal_handlers_kept():
                ray.init(address=address, configure_logging=False, namespace="prefect-rlhf")
        except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidInput(
                "RAY_ADDRESS", address, f"the address of a Ray cluster that answers ({reason:.200})"
            ) from error
    return str(ray.util.get_node_ip_address())


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Keep this process's handlers of SIGTERM and SIGINT, which Ray would replace."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _launch(
    settings: GangSettings[object], ranks_of_nodes: Sequence[int], placed: Placed, own: str
) -> tuple[_RayProcesses, Address]:
    """Check the nodes and start their ranks; return them, and the address of the world's store on the first node."""
    _check_versions(placed)
    with socket.create_server((own, 0)) as listener:
        controller = (own, listener.getsockname()[1])
        listening = [tuple(address) for address in placed.ask("listen")]
        _check_reach(placed, [*listening, controller])
        starts = [end - count for end, count in zip(accumulate(ranks_of_nodes), ranks_of_nodes, strict=True)]
        ranks = [range(start, start + count) for start, count in zip(starts, ranks_of_nodes, strict=True)]
        hello = Hello()
        python_path = [str(Path(path).absolute()) for path in sys.path]
        given = (controller, hello, python_path)
        placed.ask("start", lambda node: (settings.processes, node, ranks[node], *given))
        expected = [(rank, kind) for rank in chain(*ranks) for kind in range(CONTROL)]
        expected += [(node, CONTROL) for node in range(len(ranks))]
        try:
            wires = hello.answer(listener, expected, time.monotonic() + CONNECT_SECONDS)
        except TimeoutError as error:
            raise RankLost(f"a node's ranks did not connect to the controller in {CONNECT_SECONDS:g} s") from error
    pipes = {
        resource: tuple(message_pipe(wires[rank, kind]) for rank in chain(*ranks))
        for kind, resource in enumerate(RESOURCES)
    }
    controls = tuple(wires[node, CONTROL] for node in range(len(ranks)))
    return _RayProcesses(
        placed, pipes, controls, tuple(Deaths(wire.fileno()) for wire in controls), tuple(ranks)
    ), listening[0]


def _check_versions(placed: Placed) -> None:
    own = versions()
    for address, theirs in zip(placed.addresses, placed.ask("versions"), strict=True):
        for name, here in own.items():
            if theirs[name] != here:
                raise InvalidInput(f"node {address}", f"{name} {theirs[name]}", f"{here}, the controller's version")


def _check_gpus(placed: Placed, ranks_of_nodes: Sequence[int], kinds: Sequence[str]) -> None:
    """Raise InvalidInput for a node on which ranks cannot start, and for GPUs or drivers that differ between nodes.

    Nodes of different `kinds` have different GPUs.
    """
    found = placed.ask("usable_gpus", lambda node: (ranks_of_nodes[node],), seconds=2 * QUERY_LIMIT_SECONDS)
    first_of_kind: dict[str, tuple[str, Gpu]] = {}
    for address, kind, answer in zip(placed.addresses, kinds, found, strict=True):
        if isinstance(answer, InvalidInput):
            raise InvalidInput(f"node {address}: {answer.field}", answer.seen, answer.expected)
        gpu, driver = answer[0], found[0][0].driver
        other, expected = first_of_kind.setdefault(kind, (address, gpu))
        if gpu.name != expected.name:
            alike = f"{expected.name}, as on node {other}; or node_kinds, for GPUs of several kinds"
            raise InvalidInput(f"node {address}", gpu.name, alike)
        if gpu.driver != driver:
            raise InvalidInput(f"node {address}: driver", gpu.driver, f"{driver}, as on node {placed.addresses[0]}")


def _check_reach(placed: Placed, addresses: Sequence[Address]) -> None:
    for node, lacking in zip(placed.addresses, placed.ask("unreached", lambda node: (addresses,)), strict=True):
        for (host, port), reason in lacking:
            expected = (
                f"a network whose nodes reach each other on any port: {node} cannot reach {host}:{port} ({reason})"
            )
            raise InvalidInput("cluster", ", ".join(placed.addresses), expected)


def _check_shared(placed: Placed, shared: SharedFolder) -> None:
    """Make this machine and each node write a marker into the folder, and each read all markers.

    Raises InvalidInput if a machine cannot.
    """
    where = ("the controller's machine", *(f"node {address}" for address in placed.addresses))
    markers = [f".seen-by-all-{uuid.uuid4().hex}" for _ in where]
    ask = partial(placed.ask, seconds=MARKER_SECONDS)
    try:
        wrong = [shared.write(markers[0]), *ask("write_marker", lambda node: (shared, markers[1 + node]))]
        for machine, reason in zip(where, wrong, strict=True):
            if reason is not None:
                expected = f"a folder that every node may write: {machine} cannot ({reason})"
                raise InvalidInput(FIELD, shared.shown, expected)
        unread = [shared.unread(markers), *ask("unread_marker", lambda node: (shared, markers))]
        for machine, lacking in zip(where, unread, strict=True):
            if lacking is not None:
                marker, reason = lacking
                writer = where[markers.index(marker)]
                expected = f"storage that all machines of the run share: {machine} does not see the file of {writer}"
                raise InvalidInput(FIELD, shared.shown, f"{expected} ({reason})")
    finally:
        shared.remove(markers)


@dataclass(frozen=True, slots=True)
class _RayProcesses:
    """The ranks of several nodes, and the wires to each node."""

    placed: Placed
    connections: Mapping[Resource, tuple[Connection[Any, Any], ...]]
    controls: tuple[socket.socket, ...]  # by node
    deaths: tuple[Deaths, ...]  # by node
    ranks: tuple[range, ...]  # by node

    def where(self, rank: int) -> str:
        """See `RankProcesses.where`."""
        return f" on node {self.placed.addresses[self._node(rank)]}"

    def how_it_died(self, rank: int) -> str:
        """See `RankProcesses.how_it_died`."""
        node = self._node(rank)
        return self.deaths[node].how_it_died(rank - self.ranks[node].start)

    def kill(self) -> None:
        """See `RankProcesses.kill`. A node that cannot be reached any more ends its ranks without a request."""
        deadline = time.monotonic() + 2 * CLOSE_SECONDS
        for wire in self.controls:
            with suppress(OSError):  # the node is gone
                wire.shutdown(socket.SHUT_WR)
        for wire in self.controls:
            with suppress(OSError):
                _await_end(wire, deadline)
            wire.close()
        self.placed.release()

    def _node(self, rank: int) -> int:
        return next(node for node, ranks in enumerate(self.ranks) if rank in ranks)


def _await_end(wire: socket.socket, deadline: float) -> None:
    """Wait until the node has closed its side: its ranks have ended."""
    while select.select([wire], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not wire.recv(4096):
            return
