"""Ranks that answer at once and compute nothing: what is left is the controller's own time, orders included."""

from __future__ import annotations

import multiprocessing
import pickle
import random
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from prefect_rlhf.engines.commands import BuildCommand, CallCommand, Digest, MoveWeightsCommand, RankReport
from prefect_rlhf.engines.gang.processes.messages import Reply, Request
from prefect_rlhf.placement.augmented.resources import RESOURCES, Resource
from prefect_rlhf.placement.layout.layout import Layout

METRICS = {f"metric_{number}": 0.5 for number in range(12)}


class IdleRank:
    """A rank that does nothing."""

    def __init__(self, rank: int, size: int) -> None:
        pass

    def nothing(self) -> None:
        pass


class StubProcesses:
    """See `RankProcesses`: as many ranks, all of them served by one process."""

    def __init__(self, size: int) -> None:
        pipes = [[multiprocessing.Pipe() for _ in range(size)] for _ in RESOURCES]
        self.connections: Mapping[Resource, tuple[Connection[Any, Any], ...]] = {
            resource: tuple(ours for ours, _ in of_resource)
            for resource, of_resource in zip(RESOURCES, pipes, strict=True)
        }
        theirs = [[end for _, end in of_resource] for of_resource in pipes]
        self._server = multiprocessing.get_context("fork").Process(target=serve, args=(theirs,), daemon=True)
        self._server.start()

    def where(self, rank: int) -> str:
        return ""

    def how_it_died(self, rank: int) -> str:
        return "was lost"

    def kill(self) -> None:
        self._server.kill()
        self._server.join()


def serve(pipes: Sequence[Sequence[Connection[Any, Any]]]) -> None:
    """Answer whatever is asked on any pipe, until the controller is gone."""
    ranks = {connection: rank for of_resource in pipes for rank, connection in enumerate(of_resource)}
    layouts: dict[object, Layout] = {}
    while True:
        for connection in wait(list(ranks)):
            assert isinstance(connection, Connection)
            try:
                said = connection.recv_bytes()
            except EOFError:
                return
            message = pickle.loads(said) if said else None  # empty: all ranks have started
            value = answer(message, ranks[connection], layouts) if isinstance(message, Request) else None
            connection.send_bytes(pickle.dumps(Reply(value)))


def answer(request: Request, rank: int, layouts: dict[object, Layout]) -> RankReport | None:
    """Return what a rank would report: as many digests, lengths and metrics, with other numbers."""
    if request.method == "open_dataset":
        return None
    command = request.arguments[0]
    digest, row_lengths, metrics = None, (), {}
    match command:
        case BuildCommand():
            layouts[command.instance] = command.layout
            digest = digest_of(command.layout, rank)
        case MoveWeightsCommand():
            digest = digest_of(command.target_layout, rank)
        case CallCommand():
            metrics = METRICS
            if command.call.kind == "generate":
                row_lengths = tuple(random.choices(range(8, 60), k=len(command.rows)))
            if command.writes is not None:
                digest = digest_of(layouts[command.instance], rank)
    memory = {"device_bytes": 1, "resident_bytes": 1, "store_bytes": 1}
    state = {} if isinstance(command, CallCommand) and command.call.kind == "compute" else None
    return RankReport(seconds=0.0, digest=digest, row_lengths=row_lengths, metrics=metrics, state=state, **memory)


def digest_of(layout: Layout, rank: int) -> Digest | None:
    """Return digests of a rank's shards that add up to 0, as those of every version then do."""
    held = layout.of_rank(rank)
    return Digest.of(dict.fromkeys(held, 0)) if held else None
