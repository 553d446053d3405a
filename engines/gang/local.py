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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, final

from prefect_rlhf.engines.gang.failures import raise_first_failure
from prefect_rlhf.engines.gang.fork_server import ForkServerSettings, StartMethod
from prefect_rlhf.engines.gang.messages import Reply, Request, Start
from prefect_rlhf.engines.gang.preload import ENGINES, modules_of
from prefect_rlhf.placement.augmented.node import RESOURCES, Resource
from prefect_rlhf.placement.errors import RankLost, RankSilent, RlhfError
from prefect_rlhf.placement.lease import Backend

_PIPE_SECONDS = 30  # a message that is this long in the pipe belongs to a rank that is stopped
_FAILURE_GRACE_SECONDS = 5.0  # after one rank failed, how long the others have to fail or to finish
_CLOSE_SECONDS = 5.0


@final
class LocalGang:
    """Rank processes on this machine, in one world of `torch.distributed` on the loopback interface.

    `environment` is added to the ranks' environment, which is otherwise the controller's, so that ranks carry
    PREFECT__FLOW_RUN_ID when the controller does. Ranks write to the controller's standard error and output, and end
    within a second when the controller ends, however it ends.
    """

    def __init__(
        self,
        size: int,
        rank_factory: Callable[[int, int], object],
        *,
        device: Backend = "cpu",
        method: StartMethod | None = None,
        environment: Mapping[str, str] | None = None,
        num_threads: int = 1,
        start_seconds: float = 120.0,
        preload: tuple[str, ...] = modules_of(ENGINES),
    ) -> None:
        self.size = size
        self._ended: str | None = None
        self._closing = threading.Lock()
        self._locks = {(rank, resource): threading.Lock() for rank in range(size) for resource in RESOURCES}
        method = method or ("spawn" if device == "cuda" else "fork")
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self._launched = _launch(size, method, preload, listener, {**os.environ, **(environment or {})})
            port = listener.getsockname()[1]
        starts = [
            Start(rank, size, port, device, num_threads, start_seconds, rank_factory, dict(environment or {}))
            for rank in range(size)
        ]
        try:
            self._exchange(dict(enumerate(starts)), "joining the world", start_seconds, "compute")
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
        requests = {rank: Request(method, mine) for rank, mine in arguments.items()}
        with self._exclusively(requests, resource):
            return self._exchange(requests, doing, deadline_seconds, resource)

    def close(self) -> None:
        """See `Gang.close`."""
        self._end("the gang was closed")

    @property
    def process_group(self) -> int:
        """The id of the process group that holds every process of this gang and nothing else."""
        return self._launched.fork_server.pid

    @contextmanager
    def _exclusively(self, ranks: Iterable[int], resource: Resource) -> Iterator[None]:
        with ExitStack() as held:
            for rank in sorted(ranks):  # one order for all callers, so that none waits for another in a circle
                held.enter_context(self._locks[rank, resource])
            yield

    def _exchange(
        self, messages: Mapping[int, Start | Request], doing: str, seconds: float, resource: Resource
    ) -> dict[int, Any]:
        if self._ended:
            raise RankLost(f"no rank is left for {doing}: {self._ended}")
        connections = {rank: self._launched.connections[resource][rank] for rank in messages}
        try:
            for rank, message in messages.items():
                self._send(connections[rank], rank, message, doing)
            answers = self._collect(connections, doing, seconds)
        except (RankLost, RankSilent) as error:
            self._end(str(error))
            raise
        raise_first_failure(answers, doing)
        return {rank: answers[rank].value for rank in messages}

    def _send(self, connection: Connection[Any, Any], rank: int, message: Start | Request, doing: str) -> None:
        data = pickle.dumps(message)
        try:
            connection.send_bytes(data)
        except BlockingIOError:
            raise RankSilent(f"rank {rank} took no order for {_PIPE_SECONDS} s in {doing}") from None
        except OSError:
            raise self._lost(rank, doing) from None

    def _collect(self, connections: Mapping[int, Connection[Any, Any]], doing: str, seconds: float) -> dict[int, Reply]:
        waiting = {connection: rank for rank, connection in connections.items()}
        deadline = time.monotonic() + seconds
        answers: dict[int, Reply] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)  # wait returns what it was given
                rank = waiting.pop(connection)
                answers[rank] = self._receive(connection, rank, doing)
                if answers[rank].error:
                    deadline = min(deadline, time.monotonic() + _FAILURE_GRACE_SECONDS)
        self._end_if_silent(sorted(waiting.values()), answers, doing, seconds)
        return answers

    def _receive(self, connection: Connection[Any, Any], rank: int, doing: str) -> Reply:
        try:
            answer = pickle.loads(connection.recv_bytes())
        except BlockingIOError:
            raise RankSilent(f"rank {rank} stopped in the middle of its answer to {doing}") from None
        except (EOFError, OSError):
            raise self._lost(rank, doing) from None
        assert isinstance(answer, Reply)
        return answer

    def _end_if_silent(self, silent: list[int], answers: Mapping[int, Reply], doing: str, seconds: float) -> None:
        """Silent ranks behind a failed one are its victims, so the failure is the news; the gang is lost either way."""
        if not silent:
            return
        ranks = ("rank " if len(silent) == 1 else "ranks ") + ", ".join(map(str, silent))
        if not any(answer.error for answer in answers.values()):
            raise RankSilent(f"{ranks} gave no answer within {seconds:g} s to {doing}")
        self._end(f"{ranks} hung in {doing} after another rank failed")

    def _lost(self, rank: int, doing: str) -> RankLost:
        with self._closing:  # whoever ended the gang knows why; its death reports are read by then
            if self._ended:
                return RankLost(f"rank {rank} was ended in {doing}: {self._ended}")
            return RankLost(f"rank {rank} {self._launched.how_it_died(rank)} in {doing}")

    def _end(self, reason: str) -> None:
        with self._closing:
            if self._ended is None:
                self._ended = reason
                self._launched.kill()


@dataclass(frozen=True, slots=True)
class _Launched:
    """The processes of a gang and what ties them to this one. Closing `lifeline` ends them too."""

    fork_server: subprocess.Popen[bytes]
    connections: Mapping[Resource, tuple[Connection[Any, Any], ...]]
    lifeline: int
    deaths: int
    statuses: dict[int, int] = field(default_factory=dict)  # of the ranks that are known to be dead

    def how_it_died(self, rank: int) -> str:
        """`was killed by SIGKILL` or `ended with status 1`, from the fork server's report, which is read once."""
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


def _launch(
    size: int,
    method: StartMethod,
    preload: tuple[str, ...],
    listener: socket.socket,
    environment: Mapping[str, str],
) -> _Launched:
    """Start the fork server with one end of every pipe, of which a rank has one for each resource; keep the others."""
    pairs = [[socket.socketpair() for _ in RESOURCES] for _ in range(size)]  # of each rank
    lifeline_end, lifeline = os.pipe()
    deaths, deaths_end = os.pipe()
    pipes = tuple(tuple(theirs.fileno() for _, theirs in of_rank) for of_rank in pairs)
    settings = ForkServerSettings(method, lifeline_end, deaths_end, listener.fileno(), pipes, preload)
    fork_server = subprocess.Popen(
        settings.command(),
        env={**environment, "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path)},
        pass_fds=settings.descriptors,
        stdin=subprocess.DEVNULL,
        process_group=0,  # a terminal's Ctrl-C is for the controller alone
    )
    for theirs in (theirs for of_rank in pairs for _, theirs in of_rank):
        theirs.close()
    os.close(lifeline_end)
    os.close(deaths_end)
    ours = zip(*([_connection(ours) for ours, _ in of_rank] for of_rank in pairs), strict=True)
    return _Launched(fork_server, dict(zip(RESOURCES, ours, strict=True)), lifeline, deaths)


def _connection(end: socket.socket) -> Connection[Any, Any]:
    """A message pipe over `end` on which no send or receive blocks for longer than a stopped rank deserves."""
    limit = struct.pack("ll", _PIPE_SECONDS, 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Connection(end.detach())
