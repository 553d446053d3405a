"""A gang of rank processes on any machines: requests, replies and deaths. Every wait has a limit."""

from __future__ import annotations

import logging
import pickle
import select
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, Generic, Protocol

from prefect_rlhf.engines.gang.calls_in_flight import CallsInFlight
from prefect_rlhf.engines.gang.failures import raise_first_failure
from prefect_rlhf.engines.gang.processes.messages import RecordRequest, Reply, Request, Start
from prefect_rlhf.engines.gang.protocol import AnyRank, Arguments, Result
from prefect_rlhf.errors.errors import RankLost, RankSilent, RlhfError
from prefect_rlhf.placement.augmented.resources import Resource

_log = logging.getLogger(__name__)

PIPE_SECONDS = 30  # a rank that has not read a message after this long is stopped
RECORD_SECONDS = 30.0  # to write what ranks wait for: torch looks up its symbols first, for 3 s of a free core
IMPORTING, JOINING = "importing the engines", "joining the world"
"""The phases of a start. Each may take the `start_seconds` of the settings."""
FAILURE_GRACE_SECONDS = 5.0  # time for the other ranks to fail or finish after a rank has failed


class RankProcesses(Protocol):
    """The processes of a gang, and a pipe to each resource of each rank."""

    @property
    def connections(self) -> Mapping[Resource, tuple[Connection[Any, Any], ...]]:
        """The pipes of each resource, by rank."""
        ...

    def where(self, rank: int) -> str:
        """Return text to follow a rank's number in a message: ` on node 10.0.0.2`, or empty on this machine."""
        ...

    def how_it_died(self, rank: int) -> str:
        """Return `was killed by SIGKILL`, `ended with status 1` or a similar text for a rank whose pipe ended."""
        ...

    def kill(self) -> None:
        """End every process. Called once."""
        ...


class ProcessGang(Generic[AnyRank]):
    """Rank processes behind the interface of a `Gang`."""

    def __init__(self, processes: RankProcesses, starts: Mapping[int, Start]) -> None:
        """Start processes that wait for their `starts`. Raises the error of a rank that cannot start."""
        self.size = len(starts)
        self._processes = processes
        self._in_flight = CallsInFlight()
        self._records = False
        self._ended: str | None = None
        self._closing = threading.Lock()
        try:
            seconds = max(start.gang.start_seconds for start in starts.values())
            self._exchange({rank: pickle.dumps(start) for rank, start in starts.items()}, IMPORTING, seconds, "compute")
            self._exchange(dict.fromkeys(starts, b""), JOINING, seconds, "compute")
            self._records = any(start.gang.records for start in starts.values())
        except RlhfError:
            self.close()
            raise

    def call(
        self,
        method: Callable[[AnyRank, *Arguments], Result],
        arguments: Mapping[int, tuple[*Arguments]],
        *,
        doing: str,
        deadline_seconds: float,
        resource: Resource = "compute",
    ) -> dict[int, Result]:
        """See `Gang.call`. If a rank failed and another rank hangs because of it, the gang is closed too."""
        with self._in_flight.noted(arguments, resource, doing):
            return self._exchange(_requests(method.__name__, arguments), doing, deadline_seconds, resource)

    def close(self) -> None:
        """See `Gang.close`."""
        self._end("the gang was closed")

    def _exchange(
        self, messages: Mapping[int, bytes], doing: str, seconds: float, resource: Resource
    ) -> dict[int, Any]:
        """Send each rank its message and return the values of the replies. Raises the errors of `Gang.call`."""
        if self._ended:
            raise RankLost(f"no rank is left for {doing}: {self._ended}")
        connections = {rank: self._processes.connections[resource][rank] for rank in messages}
        try:
            for rank, message in messages.items():
                self._send(connections[rank], rank, message, doing)
            replies = self._collect(connections, doing, seconds)
        except RankSilent as error:
            self._record_collectives()
            self._end(str(error))
            raise
        except RankLost as error:
            self._end(str(error))
            raise
        for rank, reply in sorted(replies.items()):
            for line in reply.warnings:
                _log.warning("%s: %s", self._name(rank), line)
        silent = sorted(messages.keys() - replies.keys())
        raise_first_failure(replies, doing, self._name, self._name(*silent) if silent else "")
        return {rank: replies[rank].value for rank in messages}

    def _record_collectives(self) -> None:
        """Let each rank with an idle resource write its latest collectives, for RECORD_SECONDS at most."""
        if not self._records:
            return
        idle = {rank: self._in_flight.idle(rank) for rank in range(self.size)}
        pipes = {rank: self._processes.connections[resource][rank] for rank, resource in idle.items() if resource}
        message = pickle.dumps(RecordRequest())
        try:
            for pipe in pipes.values():
                pipe.send_bytes(message)
            self._collect(pipes, "writing collectives", RECORD_SECONDS)
        except (OSError, RlhfError) as error:
            _log.warning("not all ranks wrote their latest collectives: %s", error)

    def _send(self, connection: Connection[Any, Any], rank: int, message: bytes, doing: str) -> None:
        try:
            connection.send_bytes(message)
        except BlockingIOError:
            raise RankSilent(f"{self._name(rank)} accepted no request for {PIPE_SECONDS} s in {doing}") from None
        except OSError:
            raise self._lost(rank, doing) from None

    def _receive(self, connection: Connection[Any, Any], rank: int, doing: str) -> Reply:
        try:
            reply = pickle.loads(connection.recv_bytes())
        except BlockingIOError:
            raise RankSilent(f"{self._name(rank)} stopped in the middle of its answer to {doing}") from None
        except (EOFError, OSError):
            raise self._lost(rank, doing) from None
        assert isinstance(reply, Reply)
        return reply

    def _collect(self, connections: Mapping[int, Connection[Any, Any]], doing: str, seconds: float) -> dict[int, Reply]:
        """Receive every rank's reply; after a rank has failed, wait for the others for the grace time only.

        Raises RankSilent past the deadline. If other ranks hang because of a failed rank, the gang is ended and the
        failure is returned: it is the cause.
        """
        # A failed rank leaves its peers in a collective that never ends. Their deadline may be minutes away, so the
        # first error shortens it to the grace time: enough for peers that fail by themselves, and the error shown is
        # then the earliest rank's, not a timeout. EPOLLONESHOT: each rank sends a single reply, so a descriptor is read
        # once.
        waiting = {connections[rank].fileno(): rank for rank in connections}
        deadline = time.monotonic() + seconds
        replies: dict[int, Reply] = {}
        with select.epoll() as poll:  # its cost does not grow with the number of ranks that still compute
            for descriptor in waiting:
                poll.register(descriptor, select.EPOLLIN | select.EPOLLONESHOT)
            while waiting and (ready := poll.poll(max(0.0, deadline - time.monotonic()))):
                for descriptor, _ in ready:  # readable or closed; `_receive` raises RankLost for a closed pipe
                    rank = waiting.pop(descriptor)
                    replies[rank] = self._receive(connections[rank], rank, doing)
                    if replies[rank].error:
                        deadline = min(deadline, time.monotonic() + FAILURE_GRACE_SECONDS)
        if waiting:
            silent = self._name(*sorted(waiting.values()))
            if not any(reply.error for reply in replies.values()):
                raise RankSilent(f"{silent} did not answer within {seconds:g} s to {doing}")
            self._end(f"{silent} hung in {doing} after another rank failed")
        return replies

    def _lost(self, rank: int, doing: str) -> RankLost:
        with self._closing:  # `_end` has closed the death reports, but has left its reason
            if self._ended:
                return RankLost(f"{self._name(rank)} was ended in {doing}: {self._ended}")
            return RankLost(f"{self._name(rank)} {self._processes.how_it_died(rank)} in {doing}")

    def _end(self, reason: str) -> None:
        with self._closing:
            if self._ended is None:
                self._ended = reason
                self._processes.kill()

    def _name(self, *ranks: int) -> str:
        numbers = ", ".join(f"{rank}{self._processes.where(rank)}" for rank in ranks)
        return f"{'rank' if len(ranks) == 1 else 'ranks'} {numbers}"


def _requests(method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, bytes]:
    """Pickle the request of each rank; pickle arguments that several ranks share only once."""
    packed: dict[tuple[int, ...], bytes] = {}
    messages: dict[int, bytes] = {}
    for rank, values in arguments.items():
        same = tuple(map(id, values))
        if same not in packed:
            packed[same] = pickle.dumps(Request(method, values))
        messages[rank] = packed[same]
    return messages
