"""States of computations between two checkpoints: each checkpoint finds those of its step, and no others pile up."""

from dataclasses import replace

import pytest

from prefect_rlhf.engines.rank.rank import Rank
from prefect_rlhf.engines.weights.versions import Fingerprints
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint, Manifest
from prefect_rlhf.tasks.running.checkpoint_nodes import Checkpointing
from prefect_rlhf.tasks.running.saved_states import LeftStates
from tests.support.strategies import TWO_DEVICES, ppo
from tests.tasks import row_world

pytestmark = pytest.mark.quick


def state(step):
    return {"type": "int", "value": step}


@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("behind", range(4))
def test_a_checkpoint_written_later_has_its_own_steps_state(every, behind):
    """Not the newest, though the steps went on meanwhile; with the next copy waiting, at most one is behind."""
    left, due = LeftStates(every), []
    for step in range(1, 21):
        left.leave("kl", step, state(step))
        due += [step] if step % every == 0 else []
        if due and step - due[0] >= min(behind, every - 1):
            assert left.written_after(due[0]) == {"kl": state(due.pop(0))}


def test_a_stopped_run_writes_the_newest_state_of_its_last_step():
    left = LeftStates(None)
    for step in range(100):
        left.leave("kl", step, state(step))
    assert left.written_after(99) == {"kl": state(99)}
    assert left.written_after(98) == {}


def test_an_evaluation_between_checkpoints_keeps_the_last_checkpoints_state():
    """Evaluation every 4 steps runs after step 12, while the checkpoint of step 10 is written."""
    left = LeftStates(5)
    for step in (0, 4, 8, 12):
        left.leave("evaluated", step, state(step))
    assert left.written_after(10) == {"evaluated": state(8)}


@pytest.mark.parametrize("every", [None, 10])
def test_states_do_not_pile_up(every):
    left = LeftStates(every)
    for step in range(1, 1001):
        left.leave("kl", step, state(step))
        if every and step % every == 0:
            left.written_after(step)
        assert len(left._left["kl"]) <= 3


def test_an_unstorable_state_is_refused_only_when_a_checkpoint_is_written():
    left = LeftStates(2)
    left.leave("kl", 0, InvalidInput("state of kl", "Widget", "plain values"))
    with pytest.raises(InvalidInput, match="state of kl: got 'Widget'"):
        left.written_after(0)


def test_a_resumed_run_writes_states_from_before_it_again(tmp_path):
    """One that runs every so many steps may not run between two checkpoints: its state is in both."""
    graph = row_world.with_operations(ppo())
    plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
    manifest = Manifest(2, "", {}, {}, {"advantages": state(7)}, {})
    run = replace(row_world.training_run(graph, plan, 5, tmp_path), checkpoint=Checkpoint(tmp_path, manifest))
    told = []
    checkpointing = Checkpointing(run, Fingerprints(), lambda *command: told.append(command) or {})
    checkpointing.restore_states()
    assert told[0][:1] == (Rank.restore_states,)
    assert checkpointing._states.written_after(3) == {"advantages": state(7)}
