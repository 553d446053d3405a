"""The ledger of steps: when a step has ended, and that it ends once."""

from types import SimpleNamespace

import pytest

from prefect_rlhf.tasks.running.journal import STEPS_KEPT
from prefect_rlhf.tasks.running.steps.step_ledger import StepLedger

pytestmark = pytest.mark.quick


def node(step, kind="inference"):
    return SimpleNamespace(step=step, kind=kind)


def ledger(*steps):
    """A ledger of a group with a node of each of these steps."""
    found = StepLedger()
    found.hand_out(map(node, steps))
    return found


def test_a_step_ends_with_its_last_node():
    steps = ledger(0, 0, 1)
    steps.end(node(0))
    assert steps.take_ended(2).steps == ()
    steps.end(node(0))
    ended = steps.take_ended(2)
    assert ended.steps == (0,) and ended.oldest == 1 and not ended.again


def test_an_ended_step_is_returned_once():
    steps = ledger(0)
    steps.end(node(0))
    assert [steps.take_ended(1).steps for _ in range(2)] == [(0,), ()]


def test_a_step_with_nodes_in_a_later_group_does_not_end():
    """Its nodes so far have ended, but the next group holds more: step 0 is the first unfinished step."""
    steps = ledger(0)
    steps.end(node(0))
    assert steps.take_ended(0).steps == ()
    steps.hand_out([node(0), node(1)])
    assert steps.take_ended(2).steps == ()
    steps.end(node(0))
    assert steps.take_ended(2).steps == (0,)


def test_a_group_without_a_node_of_a_step_can_complete_the_step():
    """After a stop, the nodes that a step lacked may not exist any more."""
    steps = ledger(0)
    steps.end(node(0))
    steps.hand_out([])
    assert steps.take_ended(1).steps == (0,)


def test_steps_end_in_order_and_the_oldest_is_the_first_that_has_not_ended():
    steps = ledger(0, 1, 2, 3)
    for step in (2, 0, 1):
        steps.end(node(step))
    assert steps.take_ended(4).steps == (0, 1, 2)
    assert steps.take_ended(4).oldest == 3
    steps.end(node(3))
    assert steps.take_ended(4).oldest == 4


def test_steps_do_not_wait_for_a_commit():
    """It runs behind its step."""
    steps = StepLedger()
    steps.hand_out([node(0), node(0, "commit")])
    steps.end(node(0))
    assert steps.take_ended(1).steps == (0,)
    steps.end(node(0, "commit"))
    assert steps.take_ended(1).steps == ()


@pytest.mark.parametrize("group_first", [True, False])
def test_after_a_stop_no_later_step_ends(group_first):
    """Whether a group with later nodes is handed out before the stop or after it."""
    steps = StepLedger()
    if group_first:
        steps.hand_out([node(0), node(1), node(2)])
    steps.stop_after(0)
    if not group_first:
        steps.hand_out([node(0), node(1), node(2)])
    steps.end(node(0))
    ended = steps.take_ended(3)
    assert ended.steps == (0,) and ended.oldest == 3


def test_the_checkpoint_of_a_stop_ends_its_step_again():
    """The rows of the checkpoint's nodes are dropped, too, but the step's metrics were recorded at its first end."""
    steps = ledger(0, 1)
    steps.end(node(0))
    assert not steps.take_ended(2).again
    steps.stop_after(0)
    steps.hand_out([node(0, "checkpoint"), node(0, "commit")])
    steps.end(node(0, "checkpoint"))
    ended = steps.take_ended(1)
    assert ended.steps == (0,) and ended.again == {0}


def test_a_long_run_keeps_few_steps():
    steps = StepLedger()
    for step in range(10 * STEPS_KEPT):
        steps.hand_out([node(step)])
        steps.end(node(step))
        assert steps.take_ended(step + 1).steps == (step,)
    assert not steps._left and len(steps._ended) == STEPS_KEPT
