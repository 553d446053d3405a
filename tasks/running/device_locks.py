"""Who may use which devices now: a node gets all that it occupies at once, in the order of the graph.

What a node occupies is the compute or the host link of its devices, so copies to the host run beside calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.node import Node, Resource
from prefect_rlhf.placement.errors import DeviceOutsideLease
from prefect_rlhf.placement.mesh import Device


@dataclass(slots=True)
class _Claim:
    """What an announced node wants. It is ready when none is left of those it comes `after`."""

    order: int
    wants: Set[tuple[Device, Resource]]
    after: set[str]
    has_come: bool = False


class DeviceLocks:
    """All-or-nothing locks on what nodes occupy. Of those that are ready, the one earliest in the graph goes first.

    A later node may pass an earlier one that is ready only when they share nothing, so no node starves. Nodes are
    announced before they come, and the end of a node makes its followers ready in the moment in which it frees its
    devices: whose thread wakes up first decides nothing, and the run keeps to the order that was estimated.

    >>> locks = DeviceLocks(frozenset({Device(0, 0)}))
    >>> locks.check(frozenset({Device(0, 7)}))
    Traceback (most recent call last):
        ...
    prefect_rlhf.placement.errors.DeviceOutsideLease: device n0:7 is not in this run's lease (n0:0)
    """

    def __init__(self, leased: Set[Device]) -> None:
        self.leased = frozenset(leased)
        self._busy: set[tuple[Device, Resource]] = set()
        self._claims: dict[str, _Claim] = {}
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    def check(self, devices: Set[Device]) -> None:
        """Raise DeviceOutsideLease unless the run's lease holds all of `devices`."""
        outside = sorted(devices - self.leased)
        if outside:
            held = ",".join(map(str, sorted(self.leased)))
            raise DeviceOutsideLease(f"device {outside[0]} is not in this run's lease ({held})")

    def announce(self, node: Node, order: int) -> None:
        """Say that `node` will `hold` as soon as the nodes that it depends on have ended."""
        self.check(node.devices)
        with self._changed:
            self._claims[node.id] = _Claim(order, node.occupies, set(node.depends_on) - self._ended)

    @contextmanager
    def hold(self, node: Node) -> Iterator[None]:
        """Wait until all that an announced node occupies is free and no earlier ready node wants it; then hold it.

        The wait ends because each holder is a call with a deadline.
        """
        with self._changed:
            claim = self._claims[node.id]
            claim.has_come = True
            self._changed.wait_for(lambda: self._may_start(claim))
            del self._claims[node.id]
            self._busy |= claim.wants
        try:
            yield
        finally:
            self._end(node.id, claim)

    def forget_announced(self) -> None:
        """Wait for no node that has not come: a run that was cancelled starts no more of them."""
        with self._changed:
            self._claims = {name: claim for name, claim in self._claims.items() if claim.has_come}
            self._changed.notify_all()

    def _end(self, name: str, claim: _Claim) -> None:
        with self._changed:
            self._busy -= claim.wants
            self._ended.add(name)
            for other in self._claims.values():
                other.after.discard(name)
            self._changed.notify_all()

    def _may_start(self, claim: _Claim) -> bool:
        earlier = (other for other in self._claims.values() if other.order < claim.order and not other.after)
        return self._busy.isdisjoint(claim.wants) and all(claim.wants.isdisjoint(other.wants) for other in earlier)
