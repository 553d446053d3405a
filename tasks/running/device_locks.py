"""Who may begin now: a node whose dependencies have ended gets all that it occupies at once, in the order of the graph.

What a node occupies is the compute or the host link of its devices, so copies to the host run beside calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field

from prefect_rlhf.placement.augmented.node import Node, Resource
from prefect_rlhf.placement.errors import DeviceOutsideLease
from prefect_rlhf.placement.mesh import Device


@dataclass(slots=True)
class _Claim:
    """An announced node's claim to what it occupies. It is ready when none is left of those it comes `after`."""

    place: int  # in the graph
    occupies: Set[tuple[Device, Resource]]
    after: set[str]
    turn: Future[None] = field(default_factory=Future)


class DeviceLocks:
    """Alone decides when a node of a run begins. Of those that are ready, the one earliest in the graph goes first.

    A later node may pass an earlier one that is ready only when they share nothing, so no node starves. The end of a
    node makes its followers ready in the moment in which it frees its devices: whose thread wakes up first decides
    nothing, and the run keeps to the order that was estimated.
    """

    def __init__(self, leased: Set[Device], nodes: Iterable[Node]) -> None:
        self.leased = frozenset(leased)
        self._places = {node.id: place for place, node in enumerate(nodes)}
        self._waiting: dict[str, _Claim] = {}
        self._running: dict[str, _Claim] = {}
        self._stopped = False
        self._lock = threading.Lock()

    def announce(self, node: Node) -> Future[None]:
        """Return the node's turn: done once the node holds what it occupies, cancelled if the run stops before that.

        Nodes are announced after those that they depend on. Raises DeviceOutsideLease for a node on a device that the
        run's lease does not hold.
        """
        outside = sorted(node.devices - self.leased)
        if outside:
            leased = ",".join(map(str, sorted(self.leased)))
            raise DeviceOutsideLease(f"device {outside[0]} is not in this run's lease ({leased})")
        with self._lock:
            unended = {name for name in node.depends_on if name in self._waiting or name in self._running}
            claim = _Claim(self._places[node.id], node.occupies, unended)
            if self._stopped:
                claim.turn.cancel()
            else:
                self._waiting[node.id] = claim
        self._begin_those_that_may()
        return claim.turn

    def end(self, node: Node) -> None:
        """Free what a node holds. Idempotent."""
        with self._lock:
            if self._running.pop(node.id, None) is None:
                return
            for claim in self._waiting.values():
                claim.after.discard(node.id)
        self._begin_those_that_may()

    def stop(self) -> None:
        """Cancel the turns of all nodes that have not begun, now and later."""
        with self._lock:
            self._stopped = True
            dropped = list(self._waiting.values())
            self._waiting.clear()
        for claim in dropped:
            claim.turn.cancel()

    def _begin_those_that_may(self) -> None:
        with self._lock:
            ready = sorted((claim.place, name) for name, claim in self._waiting.items() if not claim.after)
            taken = {use for claim in self._running.values() for use in claim.occupies}
            begun: list[_Claim] = []
            for _, name in ready:
                claim = self._waiting[name]
                if taken.isdisjoint(claim.occupies):
                    begun.append(claim)
                    self._running[name] = self._waiting.pop(name)
                taken |= claim.occupies
        for claim in begun:  # outside of the lock, since what waits for a turn runs in this thread
            claim.turn.set_result(None)
