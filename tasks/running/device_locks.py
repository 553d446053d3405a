"""Who may begin now: a node whose dependencies have ended gets all that it occupies at once, in the order of the graph.

What a node occupies is the compute, the host link or the way to disk of its devices, so copies to the host and writes
to disk run beside calls.
"""

from __future__ import annotations

import threading
from collections.abc import Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

from prefect_rlhf.placement.augmented.node import Node, Resource
from prefect_rlhf.placement.errors import DeviceOutsideLease
from prefect_rlhf.placement.mesh import Device


@dataclass(slots=True)
class _Claim:
    """An announced node's claim to what it occupies. It is ready when none is left of those it comes `after`."""

    place: int  # in the order of announcement
    step: int
    occupies: Set[tuple[Device, Resource]]
    after: set[str]
    turn: Future[None] = field(default_factory=Future)


class DeviceLocks:
    """Alone decides when a node of a run begins. Of those that are ready, the one announced first goes first.

    A later node may pass an earlier one that is ready only when they share nothing, so no node starves. The end of a
    node makes its followers ready in the moment in which it frees its devices: whose thread wakes up first decides
    nothing, and the run keeps to the order that was estimated.
    """

    def __init__(self, leased: Set[Device]) -> None:
        self.leased = frozenset(leased)
        self._places = count()
        self._waiting: dict[str, _Claim] = {}
        self._running: dict[str, _Claim] = {}
        self._highest_begun = -1  # of the steps
        self._last_step: int | None = None  # nodes of later steps never begin
        self._is_held = False
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
            claim = _Claim(next(self._places), node.step, node.occupies, unended)
            if self._stopped or self._is_too_late(claim):
                claim.turn.cancel()
            else:
                self._waiting[node.id] = claim
        self._begin_those_that_may()
        return claim.turn

    def end(self, node: Node) -> None:
        """Free what a node holds. Idempotent."""
        # One critical section frees the devices and makes the followers ready. If these were two sections, a thread
        # between them could give the devices to a lower-priority node, and the order would depend on thread scheduling.
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

    def hold(self) -> int:
        """Let no node begin until `go_on_to`; return the latest step of which a node has begun, -1 for none."""
        with self._lock:
            self._is_held = True
            return self._highest_begun

    def go_on_to(self, last_step: int) -> None:
        """Let nodes begin again, up to those of `last_step`; turns of later steps are cancelled, now and later.

        What waits for a later step's node no longer does: that node never begins.
        """
        with self._lock:
            self._is_held, self._last_step = False, last_step
            dropped = {name: claim for name, claim in self._waiting.items() if self._is_too_late(claim)}
            self._waiting = {name: claim for name, claim in self._waiting.items() if name not in dropped}
            for claim in self._waiting.values():
                claim.after -= dropped.keys()
        for claim in dropped.values():
            claim.turn.cancel()
        self._begin_those_that_may()

    def _is_too_late(self, claim: _Claim) -> bool:
        return self._last_step is not None and claim.step > self._last_step

    def _begin_those_that_may(self) -> None:
        with self._lock:
            if self._is_held:
                return
            # A ready node that cannot begin still adds its devices to `taken`. So a later node passes it only if the
            # two share nothing, and the earlier node gets its devices as soon as the running nodes free them. Without
            # this rule a stream of small nodes could starve a node that needs all devices, and the run would leave the
            # order that was estimated.
            ready = sorted((claim.place, name) for name, claim in self._waiting.items() if not claim.after)
            taken = {use for claim in self._running.values() for use in claim.occupies}
            begun: list[_Claim] = []
            for _, name in ready:
                claim = self._waiting[name]
                if taken.isdisjoint(claim.occupies):
                    begun.append(claim)
                    self._running[name] = self._waiting.pop(name)
                    self._highest_begun = max(self._highest_begun, claim.step)
                taken |= claim.occupies
        for claim in begun:  # outside of the lock, since what waits for a turn runs in this thread
            claim.turn.set_result(None)
