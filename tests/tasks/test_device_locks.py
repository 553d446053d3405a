"""Device locks: all or nothing, graph order among those that wait, and never outside the lease."""

import threading

import pytest

from prefect_rlhf.placement.errors import DeviceOutsideLease
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.tasks.device_locks import DeviceLocks

A, B = Device(0, 0), Device(0, 1)


def started(locks, devices, order, log):
    """A thread that holds `devices` until its event is set."""
    go = threading.Event()

    def body():
        with locks.hold(frozenset(devices), order):
            log.append(order)
            go.wait(10)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, go


def settle(condition):
    for _ in range(200):
        if condition():
            return True
        threading.Event().wait(0.01)
    return False


def test_disjoint_nodes_hold_their_devices_at_the_same_time():
    locks, log = DeviceLocks({A, B}), []
    first, go_first = started(locks, {A}, 0, log)
    second, go_second = started(locks, {B}, 1, log)
    assert settle(lambda: sorted(log) == [0, 1])
    go_first.set(), go_second.set()


def test_the_earliest_waiting_node_goes_first():
    """Node 2 waits for both devices; node 3 wants one that is free, but must not starve node 2."""
    locks, log = DeviceLocks({A, B}), []
    _, release_holder = started(locks, {A}, 0, log)
    assert settle(lambda: log == [0])
    _, release_two = started(locks, {A, B}, 2, log)
    assert settle(lambda: 2 in locks._waiting)
    _, release_three = started(locks, {B}, 3, log)
    assert settle(lambda: 3 in locks._waiting)
    release_holder.set()
    assert settle(lambda: log == [0, 2])
    release_two.set()
    assert settle(lambda: log == [0, 2, 3])
    release_three.set()


def test_a_device_outside_the_lease_is_refused_by_name():
    with pytest.raises(DeviceOutsideLease, match="device n0:1 is not in this run's lease"):
        DeviceLocks({A}).check(frozenset({A, B}))
