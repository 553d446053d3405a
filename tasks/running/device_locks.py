"""Decides when nodes start: once its dependencies have ended, a node gets all its resources at once, in graph order.

Resources are the compute, the host link and the disk path of devices, so copies to the host and writes to disk run
concurrently with calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count

from prefect_rlhf.errors.errors import DeviceOutsideLease
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.resources import Resource
from prefect_rlhf.placement.devices.mesh import Device


@dataclass(slots=True)
class _Claim:
    """An announced node's claim to its resources. It is ready when `after` is empty."""

    place: int  # in the order of announcement
    step: int
    occupies: Set[tuple[Device, Resource]]
    after: set[str]
    turn: Future[None] = field(default_factory=Future)


class DeviceLocks:
    """Decides when each node of a run begins. Among ready nodes, the node announced first has priority.

    A later node may pass an earlier ready node only if they share no resource, so no node starves. The end of a node
    makes its followers ready in the same critical section that frees its devices. The order therefore does not depend
    on thread scheduling, and the run keeps to the estimated order.
    """

    def __init__(self, leased: Set[Device]) -> None:
        self.leased = frozenset(leased)
        self._places = count()
        self._waiting: dict[str, _Claim] = {}
        self._running: dict[str, _Claim] = {}
        self._void: dict[str, Set[str]] = {}  # nodes that never begin, with the nodes that they waited for
        self._highest_begun = -1  # of the steps
        self._last_step: int | None = None  # nodes of later steps never begin
        self._is_held = False
        self._stopped = False
        self._lock = threading.Lock()

    def announce(self, node: Node) -> Future[None]:
        """Return the node's turn: done once the node holds its resources, cancelled if the run stops earlier.

        A node must be announced after its dependencies. Raises DeviceOutsideLease for a node on a device outside the
        run's lease.
        """
        outside = sorted(node.devices - self.leased)
        if outside:
            leased = ",".join(map(str, sorted(self.leased)))
            raise DeviceOutsideLease(f"device {outside[0]} is not in this run's lease ({leased})")
        with self._lock:
            claim = _Claim(next(self._places), node.step, node.occupies, self._unended(node.depends_on))
            replaced = None
            if self._stopped or self._is_too_late(claim):
                self._void[node.id] = claim.after
                claim.turn.cancel()
            else:  # an offload may move to an earlier step, and be announced again
                replaced = self._waiting.pop(node.id, None)
                self._waiting[node.id] = claim
                self._void.pop(node.id, None)
        if replaced is not None:
            replaced.turn.cancel()
        self._begin_those_that_may()
        return claim.turn

    def end(self, node: Node) -> None:
        """Free a node's resources. Idempotent."""
        # One critical section frees the devices and makes the followers ready. If these were two sections, a thread
        # between them could give the devices to a lower-priority node, and the order would depend on thread scheduling.
        with self._lock:
            if self._running.pop(node.id, None) is None:
                return
            for claim in self._waiting.values():
                claim.after.discard(node.id)
        self._begin_those_that_may()

    def stop(self) -> None:
        """Cancel the turns of all nodes that have not begun, including nodes announced later."""
        with self._lock:
            self._stopped = True
            dropped = list(self._waiting.values())
            self._waiting.clear()
        for claim in dropped:
            claim.turn.cancel()

    def hold(self) -> int:
        """Start no further node until `go_on_to`; return the latest step with a started node, or -1."""
        with self._lock:
            self._is_held = True
            return self._highest_begun

    def go_on_to(self, last_step: int) -> None:
        """Start nodes again, up to `last_step`. Turns of later steps are cancelled, including nodes announced later.

        A node that waits for a cancelled node then waits for that node's predecessors instead.
        """
        with self._lock:
            self._is_held, self._last_step = False, last_step
            dropped = {name: claim for name, claim in self._waiting.items() if self._is_too_late(claim)}
            self._void |= {name: claim.after for name, claim in dropped.items()}
            self._waiting = {name: claim for name, claim in self._waiting.items() if name not in dropped}
            for claim in self._waiting.values():
                claim.after = self._unended(claim.after)
        for claim in dropped.values():
            claim.turn.cancel()
        self._begin_those_that_may()

    def _unended(self, names: Iterable[str]) -> set[str]:
        """Return the nodes that have not ended; in place of a node that never begins, its own predecessors."""
        unended, seen, left = set[str](), set[str](), list(names)
        while left:  # void nodes have many common predecessors, so each is looked at once
            name = left.pop()
            if name not in seen:
                seen.add(name)
                if name in self._waiting or name in self._running:
                    unended.add(name)
                left += self._void.get(name, ())
        return unended

    def _is_too_late(self, claim: _Claim) -> bool:
        return self._last_step is not None and claim.step > self._last_step

    def _begin_those_that_may(self) -> None:
        with self._lock:
            if self._is_held:
                return
            # A ready node that cannot begin still adds its resources to `taken`. So a later node passes it only if the
            # two share no resource, and the earlier node begins as soon as the running nodes free its resources.
            # Without this rule a stream of small nodes could starve a node that needs all devices, and the run would
            # leave the order that was estimated.
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
        for claim in begun:  # outside of the lock, since callbacks of a turn run in this thread
            claim.turn.set_result(None)
