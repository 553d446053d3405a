"""Device locks: all or nothing, graph order among those that are ready, and never outside the lease."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from prefect_rlhf.errors.errors import DeviceOutsideLease
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.work import Compute, Offload, Reload, Transfer
from prefect_rlhf.placement.devices.mesh import Device, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.schedule import schedule
from prefect_rlhf.tasks.running.device_locks import DeviceLocks
from tests.support.strategies import TWO_DEVICES, call, placed, ppo

pytestmark = pytest.mark.quick

A, B = Device(0, 0), Device(0, 1)
MESHES = {frozenset({A}): "n0:0", frozenset({B}): "n0:1", frozenset({A, B}): "n0:0-1"}


CALL = call("gae", "compute", None, {})
COMPUTE, TRANSFER = Compute(CALL), Transfer(CALL, ())
INSTANCE = ModelInstance("actor", "megatron", DeviceMesh(0, 1, 0, 1), Strategy())
RELOAD, OFFLOAD = (copy(INSTANCE, "all", 0, stops_devices=False) for copy in (Reload, Offload))


def node(name, *devices, work=COMPUTE, after=(), step=0):
    mesh = DeviceMesh.parse(MESHES[frozenset(devices)])
    return Node(name, step, (mesh,), tuple(Dependency(other, "data") for other in after), "a test.", work)


class Run:
    """Announces nodes in their order; notes which begin, until they are told to end."""

    def __init__(self, *nodes):
        self.nodes, self.begun = {node.id: node for node in nodes}, []
        self.locks = DeviceLocks({A, B})
        self.turns = {node.id: self.announce(node) for node in nodes}

    def announce(self, node):
        turn = self.locks.announce(node)
        turn.add_done_callback(lambda turn: turn.cancelled() or self.begun.append(node.id))
        return turn

    def end(self, *names):
        for name in names:
            self.locks.end(self.nodes[name])


def test_disjoint_nodes_hold_their_devices_at_the_same_time():
    run = Run(node("first", A), node("second", B))
    assert run.begun == ["first", "second"]


def test_the_earliest_ready_node_goes_first():
    """`both` waits for two devices; `later` wants one that is free, but must not starve it."""
    run = Run(node("holder", A), node("both", A, B), node("later", B))
    assert run.begun == ["holder"]
    run.end("holder")
    assert run.begun == ["holder", "both"]
    run.end("both")
    assert run.begun == ["holder", "both", "later"]


def test_a_consumer_is_ready_as_soon_as_its_producer_ends():
    """The end of `producer` makes a transfer ready; a call that shares a device must not slip in before it."""
    run = Run(node("producer", A), node("transfer", A, B, work=TRANSFER, after=["producer"]), node("call", A))
    assert run.begun == ["producer"]
    run.end("producer")
    assert run.begun == ["producer", "transfer"]
    run.end("transfer")
    assert run.begun == ["producer", "transfer", "call"]


def test_no_node_waits_behind_a_node_that_is_not_ready():
    run = Run(node("producer", B), node("follower", A, after=["producer"]), node("call", A))
    assert run.begun == ["producer", "call"]


def test_a_node_does_not_wait_for_dependencies_that_ended_before_it():
    run = Run(node("producer", A))
    run.end("producer", "producer")
    assert run.locks.announce(node("producer", A, after=["long gone"])).done()


def test_host_link_copies_wait_for_each_other_but_not_for_calls():
    run = Run(
        node("call", A),
        node("reload", A, work=RELOAD),
        node("offload", A, work=OFFLOAD),
    )
    assert run.begun == ["call", "reload"]
    run.end("reload")
    assert run.begun == ["call", "reload", "offload"]


def test_a_stopped_run_begins_no_further_node():
    """What runs keeps its devices until it ends; all other turns are cancelled, so nobody waits for them."""
    run = Run(node("running", A), node("waiting", A), node("follower", B, after=["running"]))
    run.locks.stop()
    run.end("running")
    assert run.begun == ["running"]
    assert [turn.cancelled() for turn in run.turns.values()] == [False, True, True]
    assert run.locks.announce(run.nodes["waiting"]).cancelled()


def test_a_held_run_finishes_its_step_and_begins_no_later_step():
    """A node that waits for a node of a later step waits for its predecessors instead, announced now or later."""
    reader, saved = node("reader@2", B, step=2, after=["running@1"]), node("saved@2", A, step=2, after=["reader@2"])
    train = node("train@1", B, step=1, after=["saved@2"])
    run = Run(node("running@1", A, step=1), node("other@1", A, step=1), reader, saved, train)
    assert run.locks.hold() == 1
    run.locks.go_on_to(1)
    assert run.begun == ["running@1"] and run.turns["saved@2"].cancelled()
    late = run.locks.announce(node("late@2", A, step=2, after=["running@1"]))
    offload = run.locks.announce(node("offload@1", A, step=1, after=["late@2"]))
    assert late.cancelled() and not offload.done()
    run.end("running@1")
    assert run.begun == ["running@1", "other@1", "train@1"] and not offload.done()
    run.end("other@1")
    assert offload.done()
    assert run.turns["reader@2"].cancelled() and run.locks.announce(node("next@2", A, step=2)).cancelled()


def test_a_node_waits_through_many_void_nodes():
    """They have a number of paths between them that no program could follow."""
    run = Run(node("first@0", A))
    run.locks.hold()
    run.locks.go_on_to(0)
    before = ["first@0"]
    for layer in range(60):
        names = [f"{place}@{layer + 1}" for place in ("left", "right")]
        assert all(run.locks.announce(node(name, A, step=layer + 1, after=before)).cancelled() for name in names)
        before = names
    last = run.locks.announce(node("last@0", B, after=before))
    assert not last.done()
    run.end("first@0")
    assert last.done()


def test_a_node_announced_again_replaces_the_first_announcement():
    run = Run(node("running@0", A), node("offload@0", A, step=1))
    first = run.turns["offload@0"]
    again = run.locks.announce(node("offload@0", A))
    assert first.cancelled() and not again.done()
    run.end("running@0")
    assert again.done() and not again.cancelled()


def test_a_device_outside_the_lease_is_refused_by_name():
    both = node("both", A, B)
    with pytest.raises(DeviceOutsideLease, match=r"device n0:1 is not in this run's lease \(n0:0\)"):
        DeviceLocks({A}).announce(both)


@pytest.mark.parametrize("seed", range(3))
def test_transfers_precede_long_calls_so_both_train_steps_overlap(seed):
    """With threads that wake up in any order: whenever one train_step of `split` runs, the other can begin.

    The transfer to the critic's train_step takes rows from the device on which the actor trains.
    """
    plan = preset("split", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    augmented = augment(ppo(), plan, 4)
    locks, chance, lock = DeviceLocks({A, B}), random.Random(seed), threading.Lock()
    meetings = {step: threading.Barrier(2) for step in range(1, 5)}

    def run(node, turn):
        turn.result(30)
        with lock:
            late = chance.random() * 0.01
        threading.Event().wait(late)
        if node.kind == "train_step":
            meetings[node.step].wait(30)  # breaks, and fails the test, when the other cannot run beside
        locks.end(node)

    turns = [(node, locks.announce(node)) for node in augmented]
    with ThreadPoolExecutor(len(augmented)) as threads:
        for future in [threads.submit(run, *turn) for turn in turns]:
            future.result()


def test_locks_forget_ended_nodes():
    """However long a run is."""
    plan = preset("split", ppo(), TWO_DEVICES, TWO_DEVICES.whole)
    augmented = augment(ppo(), plan, 12)
    locks = DeviceLocks({A, B})
    for node in augmented:
        assert locks.announce(node).done()
        locks.end(node)
        assert not locks._waiting and not locks._running


def test_a_runs_order_equals_the_estimated_order():
    """The estimator's rule for who goes first is this one: see placement.schedule, rule `run`."""
    plan = placed(preset("split", ppo(), TWO_DEVICES, TWO_DEVICES.whole), "ref_inference", offload="all")
    augmented = augment(ppo(), plan, 2)
    slots = schedule(augmented, lambda one: 5.0 if one.kind == "train_step" else 1.0).slots
    train = {slot.node.id: (slot.start, slot.end) for slot in slots if slot.node.kind == "train_step"}
    assert train["actor_train_step@2"] == train["critic_train_step@2"]
