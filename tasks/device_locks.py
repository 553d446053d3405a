"""Who may use which devices now: a node gets all devices of its meshes at once, in the order of the graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Set
from contextlib import contextmanager

from prefect_rlhf.placement.errors import DeviceOutsideLease
from prefect_rlhf.placement.mesh import Device


class DeviceLocks:
    """All-or-nothing locks on sets of devices. Of those that wait, the one earliest in the graph goes first.

    A later node may pass a waiting earlier one only when they share no device, so no node starves.

    >>> locks = DeviceLocks(frozenset({Device(0, 0)}))
    >>> with locks.hold(frozenset({Device(0, 0)}), order=0): pass
    >>> with locks.hold(frozenset({Device(0, 7)}), order=1): pass
    Traceback (most recent call last):
        ...
    prefect_rlhf.placement.errors.DeviceOutsideLease: device n0:7 is not in this run's lease (n0:0)
    """

    def __init__(self, leased: Set[Device]) -> None:
        self.leased = frozenset(leased)
        self._busy: set[Device] = set()
        self._waiting: dict[int, Set[Device]] = {}
        self._changed = threading.Condition()

    def check(self, devices: Set[Device]) -> None:
        """Raise DeviceOutsideLease unless the run's lease holds all of `devices`."""
        outside = sorted(devices - self.leased)
        if outside:
            held = ",".join(map(str, sorted(self.leased)))
            raise DeviceOutsideLease(f"device {outside[0]} is not in this run's lease ({held})")

    @contextmanager
    def hold(self, devices: Set[Device], order: int) -> Iterator[None]:
        """Wait until all of `devices` are free and no earlier node waits for one of them; then hold them.

        The wait ends because each holder is a call with a deadline.
        """
        self.check(devices)
        with self._changed:
            self._waiting[order] = devices
            self._changed.wait_for(lambda: self._may_start(devices, order))
            del self._waiting[order]
            self._busy |= devices
        try:
            yield
        finally:
            with self._changed:
                self._busy -= devices
                self._changed.notify_all()

    def _may_start(self, devices: Set[Device], order: int) -> bool:
        earlier = (wanted for other, wanted in self._waiting.items() if other < order)
        return self._busy.isdisjoint(devices) and all(devices.isdisjoint(wanted) for wanted in earlier)
