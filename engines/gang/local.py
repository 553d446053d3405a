"""A gang on this machine: one process per device, forked from one that has the engines imported (spawned on CUDA)."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, final

from prefect_rlhf.engines.gang.calls_in_flight import CallsInFlight
from prefect_rlhf.engines.gang.failures import raise_first_failure
from prefect_rlhf.engines.gang.fork_server import ForkServerSettings
from prefect_rlhf.engines.gang.messages import GangSettings, Reply, Request, Start
from prefect_rlhf.placement.augmented.node import RESOURCES, Resource
from prefect_rlhf.placement.errors import RankLost, RankSilent, RlhfError

_PIPE_SECONDS = 30  # a message that is this long in the pipe belongs to a rank that is stopped
_FAILURE_GRACE_SECONDS = 5.0  # after one rank failed, how long the others have to fail or to finish
_CLOSE_SECONDS = 5.0


@final
class LocalGang:
    """Rank processes on this machine, in one world of `torch.distributed` on the loopback interface.

    Ranks carry PREFECT__FLOW_RUN_ID when the controller does, write to its standard error and output, and end within a
    second when the controller ends, however it ends.
    """

    def __init__(self, settings: GangSettings) -> None:
        self.size = settings.size
        self._in_flight = CallsInFlight()
        self._ended: str | None = None
        self._closing = threading.Lock()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._processes = _launch(settings, listener)
            port = listener.getsockname()[1]
        starts = {rank: Start(rank, port, settings) for rank in range(self.size)}
        try:
            self._exchange(starts, "joining the world", settings.start_seconds, "compute")
        except RlhfError:
            self.close()
            raise

    def call(
        self,
        method: str,
        arguments: Mapping[int, tuple[Any, ...]],
        *,
        doing: str,
        deadline_seconds: float,
        resource: Resource = "compute",
    ) -> dict[int, Any]:
        """See `Gang.call`. When a rank failed and another is stuck behind it, the gang is closed too."""
        with self._in_flight.noted(arguments, resource, doing):
            requests = {rank: Request(method, values) for rank, values in arguments.items()}
            return self._exchange(requests, doing, deadline_seconds, resource)

    def close(self) -> None:
        """See `Gang.close`."""
        self._end("the gang was closed")

    @property
    def process_group(self) -> int:
        """The id of the process group that holds every process of this gang and nothing else."""
        return self._processes.fork_server.pid

    def _exchange(
        self, messages: Mapping[int, Start | Request], doing: str, seconds: float, resource: Resource
    ) -> dict[int, Any]:
        """Send each rank its message and return what they reply. Raises as `Gang.call` does."""
        if self._ended:
            raise RankLost(f"no rank is left for {doing}: {self._ended}")
        connections = {rank: self._processes.connections[resource][rank] for rank in messages}
        try:
            for rank, message in messages.items():
                self._send(connections[rank], rank, message, doing)
            replies = self._collect(connections, doing, seconds)
        except (RankLost, RankSilent) as error:
            self._end(str(error))
            raise
        raise_first_failure(replies, doing)
        return {rank: replies[rank].value for rank in messages}

    def _send(self, connection: Connection[Any, Any], rank: int, message: Start | Request, doing: str) -> None:
        data = pickle.dumps(message)
        try:
            connection.send_bytes(data)
        except BlockingIOError:
            raise RankSilent(f"rank {rank} took no order for {_PIPE_SECONDS} s in {doing}") from None
        except OSError:
            raise self._lost(rank, doing) from None

    def _receive(self, connection: Connection[Any, Any], rank: int, doing: str) -> Reply:
        try:
            reply = pickle.loads(connection.recv_bytes())
        except BlockingIOError:
            raise RankSilent(f"rank {rank} stopped in the middle of its answer to {doing}") from None
        except (EOFError, OSError):
            raise self._lost(rank, doing) from None
        assert isinstance(reply, Reply)
        return reply

    def _collect(self, connections: Mapping[int, Connection[Any, Any]], doing: str, seconds: float) -> dict[int, Reply]:
        """Receive every rank's reply; once one has failed, wait no longer than the grace time for the others.

        Raises RankSilent past the deadline. Ranks that hang behind a failed one are its victims: the failure is the
        news, and the gang is lost either way.
        """
        waiting = {connection: rank for rank, connection in connections.items()}
        deadline = time.monotonic() + seconds
        replies: dict[int, Reply] = {}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)  # wait returns what it was given
                rank = waiting.pop(connection)
                replies[rank] = self._receive(connection, rank, doing)
                if replies[rank].error:
                    deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)
        if waiting:
            silent = ("rank " if len(waiting) == 1 else "ranks ") + ", ".join(map(str, sorted(waiting.values())))
            if not any(reply.error for reply in replies.values()):
                raise RankSilent(f"{silent} gave no answer within {seconds:g} s to {doing}")
            self._end(f"{silent} hung in {doing} after another rank failed")
        return replies

    def _lost(self, rank: int, doing: str) -> RankLost:
        with self._closing:  # whoever ended the gang knows why; its death reports are read by then
            if self._ended:
                return RankLost(f"rank {rank} was ended in {doing}: {self._ended}")
            return RankLost(f"rank {rank} {self._processes.how_it_died(rank)} in {doing}")

    def _end(self, reason: str) -> None:
        with self._closing:
            if self._ended is None:
                self._ended = reason
                self._processes.kill()


@dataclass(frozen=True, slots=True)
class _Processes:
    """The processes of a gang and what ties them to this one. Closing `lifeline` ends them too."""

    fork_server: subprocess.Popen[bytes]
    connections: Mapping[Resource, tuple[Connection[Any, Any], ...]]
    lifeline: int
    deaths: int
    statuses: dict[int, int] = field(default_factory=dict)  # of the ranks that are known to be dead

    def how_it_died(self, rank: int) -> str:
        """Say `was killed by SIGKILL` or `ended with status 1`, from the fork server's report, which is read once."""
        while rank not in self.statuses and select.select([self.deaths], [], [], 1.0)[0]:
            report = os.read(self.deaths, 4096)
            if not report:  # the fork server is gone
                break
            self.statuses.update({death["rank"]: death["status"] for death in map(json.loads, report.splitlines())})
        if rank not in self.statuses:
            return "was lost"
        status = os.waitstatus_to_exitcode(self.statuses[rank])
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def kill(self) -> None:
        """End every process: SIGTERM lets the fork server kill and reap its ranks; failing that, kill the group."""
        self.fork_server.terminate()
        try:
            self.fork_server.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.fork_server.pid, signal.SIGKILL)
            self.fork_server.wait(_CLOSE_SECONDS)
        os.close(self.lifeline)
        os.close(self.deaths)


def _launch(settings: GangSettings, listener: socket.socket) -> _Processes:
    """Start the fork server with one end of every pipe, of which a rank has one for each resource; keep the others."""
    pairs = [[socket.socketpair() for _ in RESOURCES] for _ in range(settings.size)]  # of each rank
    lifeline_end, lifeline = os.pipe()
    deaths, deaths_end = os.pipe()
    pipes = tuple(tuple(theirs.fileno() for _, theirs in of_rank) for of_rank in pairs)
    method = settings.method or ("spawn" if settings.device == "cuda" else "fork")
    server = ForkServerSettings(method, lifeline_end, deaths_end, listener.fileno(), pipes, settings.preload)
    python_path = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)
    fork_server = subprocess.Popen(
        server.command(),
        env={**os.environ, **settings.environment, "PYTHONPATH": python_path},
        pass_fds=server.descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,  # a terminal's Ctrl-C is for the controller alone
    )
    for theirs in (theirs for of_rank in pairs for _, theirs in of_rank):
        theirs.close()
    os.close(lifeline_end)
    os.close(deaths_end)
    ours = zip(*([_connection(ours) for ours, _ in of_rank] for of_rank in pairs), strict=True)
    return _Processes(fork_server, dict(zip(RESOURCES, ours, strict=True)), lifeline, deaths)


def _connection(end: socket.socket) -> Connection[Any, Any]:
    """Make a message pipe over `end` on which no send or receive blocks for longer than a stopped rank deserves."""
    limit = struct.pack("ll", _PIPE_SECONDS, 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Connection(end.detach())
