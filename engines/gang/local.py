"""A gang on this machine: a process per device, forked from a process with the engines imported (spawned on CUDA)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, final

from prefect_rlhf.engines.gang.process_gang import PIPE_SECONDS, ProcessGang
from prefect_rlhf.engines.gang.processes.messages import GangSettings, Start
from prefect_rlhf.engines.gang.processes.node_ranks import Deaths, NodeRanks
from prefect_rlhf.engines.gang.protocol import AnyRank
from prefect_rlhf.placement.augmented.resources import RESOURCES, Resource

LOOPBACK = "127.0.0.1"


@final
class LocalGang(ProcessGang[AnyRank]):
    """Rank processes on this machine, in one world of `torch.distributed` on the loopback interface.

    If the controller has PREFECT__FLOW_RUN_ID, the ranks have it too. They write to the controller's standard error and
    output, and end within a second of the controller, however it ends.
    """

    def __init__(self, settings: GangSettings[AnyRank]) -> None:
        with socket.create_server((LOOPBACK, 0)) as listener:
            processes = _launch(settings, listener)
            port = listener.getsockname()[1]
        self.process_group = processes.ranks.fork_server.pid  # contains exactly the processes of this gang
        super().__init__(processes, {r: Start(r, r, LOOPBACK, port, settings) for r in range(settings.size)})


@dataclass(frozen=True, slots=True)
class _LocalProcesses:
    """The ranks of this machine."""

    ranks: NodeRanks
    deaths: Deaths
    connections: Mapping[Resource, tuple[Connection[Any, Any], ...]]

    def where(self, rank: int) -> str:
        """See `RankProcesses.where`."""
        return ""

    def how_it_died(self, rank: int) -> str:
        """See `RankProcesses.how_it_died`."""
        return self.deaths.how_it_died(rank)

    def kill(self) -> None:
        """See `RankProcesses.kill`."""
        self.ranks.kill()
        os.close(self.deaths.reports)


def _launch(settings: GangSettings[object], listener: socket.socket) -> _LocalProcesses:
    """Start the ranks with their ends of the pipes, one pipe per resource of a rank; keep the other ends."""
    pairs = [[socket.socketpair() for _ in RESOURCES] for _ in range(settings.size)]  # by rank
    deaths, deaths_end = os.pipe()
    pipes = [[theirs.fileno() for _, theirs in of_rank] for of_rank in pairs]
    ranks = NodeRanks.start(settings.processes, pipes, deaths_end, listener.fileno(), os.environ)
    for theirs in (theirs for of_rank in pairs for _, theirs in of_rank):
        theirs.close()
    os.close(deaths_end)
    ours = zip(*([message_pipe(ours) for ours, _ in of_rank] for of_rank in pairs), strict=True)
    return _LocalProcesses(ranks, Deaths(deaths), dict(zip(RESOURCES, ours, strict=True)))


def message_pipe(end: socket.socket) -> Connection[Any, Any]:
    """Make a message pipe over `end`; no send or receive blocks for more than PIPE_SECONDS."""
    limit = struct.pack("ll", PIPE_SECONDS, 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return Connection(end.detach())
