"""Device locks: all or nothing, graph order among those that are ready, and never outside the lease."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.errors import DeviceOutsideLease
from prefect_rlhf.placement.mesh import Device, DeviceMesh
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.schedule import schedule
from prefect_rlhf.tasks.running.device_locks import DeviceLocks
from tests.strategies import TWO_DEVICES, placed, ppo

A, B = Device(0, 0), Device(0, 1)
MESHES = {frozenset({A}): "n0:0", frozenset({B}): "n0:1", frozenset({A, B}): "n0:0-1"}


def node(name, *devices, kind="inference", after=()):
    mesh = DeviceMesh.parse(MESHES[frozenset(devices)])
    return Node(name, kind, 0, (mesh,), tuple(Dependency(other, "data") for other in after), "a test.")


class Run:
    """Announces nodes in their order; each that comes holds its devices until it is told to end."""

    def __init__(self, *nodes):
        self.locks, self.nodes = DeviceLocks({A, B}), {one.id: one for one in nodes}
        self.begun, self.go = [], {one.id: threading.Event() for one in nodes}
        for order, one in enumerate(nodes):
            self.locks.announce(one, order)

    def come(self, name):
        """The node's thread gets to its `hold`."""

        def body():
            with self.locks.hold(self.nodes[name]):
                self.begun.append(name)
                self.go[name].wait(10)

        threading.Thread(target=body, daemon=True).start()
        claims = self.locks._claims
        assert settle(lambda: name in self.begun or (name in claims and claims[name].has_come))

    def end(self, name):
        self.go[name].set()
        assert settle(lambda: name in self.locks._ended)


def settle(condition):
    for _ in range(500):
        if condition():
            return True
        threading.Event().wait(0.01)
    return False


def test_disjoint_nodes_hold_their_devices_at_the_same_time():
    run = Run(node("first", A), node("second", B))
    run.come("second")
    run.come("first")
    assert settle(lambda: run.begun == ["second", "first"])


def test_the_earliest_ready_node_goes_first():
    """`both` waits for two devices; `later` wants one that is free, but must not starve it."""
    run = Run(node("holder", A), node("both", A, B), node("later", B))
    run.come("holder")
    run.come("both")
    run.come("later")
    run.end("holder")
    assert settle(lambda: run.begun == ["holder", "both"])
    run.end("both")
    assert settle(lambda: run.begun == ["holder", "both", "later"])


def test_a_follower_that_is_ready_is_waited_for_though_its_thread_is_late():
    """The end of `producer` makes a transfer ready; a call that shares a device must not slip in before it."""
    run = Run(node("producer", A), node("transfer", A, B, kind="transfer", after=["producer"]), node("call", A))
    run.come("producer")
    run.come("call")
    run.end("producer")
    assert run.begun == ["producer"]
    run.come("transfer")
    run.end("transfer")
    assert settle(lambda: run.begun == ["producer", "transfer", "call"])


def test_nobody_waits_for_a_node_that_is_not_ready():
    run = Run(node("producer", B), node("follower", A, after=["producer"]), node("call", A))
    run.come("producer")
    run.come("call")
    assert settle(lambda: run.begun == ["producer", "call"])


def test_copies_over_the_host_link_do_not_wait_for_calls_but_for_each_other():
    run = Run(node("call", A), node("reload", A, kind="reload"), node("offload", A, kind="offload"))
    run.come("call")
    run.come("reload")
    run.come("offload")
    assert settle(lambda: run.begun == ["call", "reload"])
    run.end("reload")
    assert settle(lambda: run.begun == ["call", "reload", "offload"])


def test_a_cancelled_run_waits_for_nothing_that_will_not_come():
    run = Run(node("never", A), node("call", A))
    run.come("call")
    assert run.begun == []
    run.locks.forget_announced()
    assert settle(lambda: run.begun == ["call"])


def test_a_device_outside_the_lease_is_refused_by_name():
    with pytest.raises(DeviceOutsideLease, match="device n0:1 is not in this run's lease"):
        DeviceLocks({A}).announce(node("both", A, B), 0)


@pytest.mark.parametrize("seed", range(3))
def test_transfers_go_before_long_calls_and_both_train_steps_run_at_once(seed):
    """With threads that wake up in any order: whenever one train_step of `split` runs, the other can begin.

    The transfer to the critic's train_step takes rows from the device on which the actor trains.
    """
    plan = preset("split", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    augmented = augment(ppo(), plan, 4)
    locks, chance, lock = DeviceLocks({A, B}), random.Random(seed), threading.Lock()
    ended = {one.id: threading.Event() for one in augmented}
    meetings = {step: threading.Barrier(2) for step in range(4)}

    def run(one):
        for before in one.depends_on:
            assert ended[before].wait(30)
        with lock:
            late = chance.random() * 0.01
        threading.Event().wait(late)
        with locks.hold(one):
            if one.kind == "train_step":
                meetings[one.step].wait(30)  # breaks, and fails the test, when the other cannot run beside
        ended[one.id].set()

    for order, one in enumerate(augmented):
        locks.announce(one, order)
    with ThreadPoolExecutor(len(augmented)) as threads:
        for future in [threads.submit(run, one) for one in augmented]:
            future.result()


def test_the_order_of_a_run_is_the_one_that_is_estimated():
    """The estimator's rule for who goes first is this one: see placement.schedule, rule `run`."""
    plan = placed(preset("split", ppo(), TWO_DEVICES, TWO_DEVICES.whole), "ref_inference", offload="all")
    augmented = augment(ppo(), plan, 2)
    slots = schedule(augmented, lambda one: 5.0 if one.kind == "train_step" else 1.0).slots
    train = {slot.node.id: (slot.start, slot.end) for slot in slots if slot.node.kind == "train_step"}
    assert train["actor_train_step@1"] == train["critic_train_step@1"]
