"""Moves of a role: all calls on its trained copy go together, where the problem calls it faster."""

import pytest

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.neighbours import changed_plan, improve_locally, role_moves
from prefect_rlhf.placement.search.budget import Budget, Meter
from tests.placement.planner.test_planner import GRAPHS, planned, question

TRAINED = {"actor_train_step"}, {"critic_train_step", "critic_inference"}
FROZEN = {"ref_inference", "reward_inference"}


def slowest_preset(name: str) -> ExecutionPlan:
    return max(
        (one for one in planned(name).presets if one.plan and one.estimate), key=lambda one: one.estimate.seconds
    ).plan


def test_the_calls_of_a_copy_move_together_and_two_roles_do_as_well():
    start, asked = slowest_preset("ppo"), question(GRAPHS["ppo"])
    moves = list(role_moves(start, planned("ppo").space, most_seconds=1e9))
    together = (*TRAINED, set().union(*TRAINED), FROZEN)
    assert {frozenset(move) for move in moves} == {frozenset(calls) for calls in together}
    for move in moves:
        assert len({(move[call].mesh, move[call].strategy) for call in TRAINED[1] & move.keys()}) <= 1
        assert changed_plan(asked, start, move) is not None


def test_a_role_does_not_move_if_the_problem_says_that_it_is_no_faster():
    plan, space, seconds = planned("ppo").plan, planned("ppo").space, planned("ppo").seconds
    every, faster = (list(role_moves(plan, space, most)) for most in (1e9, seconds))
    assert len(faster) < len(every)
    assert not list(role_moves(plan, space, 0.0))


@pytest.mark.parametrize("name", ["ppo", "remax"])
def test_local_search_never_makes_a_preset_slower(name):
    asked, found = question(GRAPHS[name]), planned(name)
    starts = [one.plan for one in found.presets if one.plan and one.estimate and asked.fits(one.plan)]
    improved = [improve_locally(asked, start, found.space, Meter(Budget(evaluations=100_000))) for start in starts]
    pairs = list(zip(starts, improved, strict=True))
    assert all(asked.fits(after) and asked.seconds(after) <= asked.seconds(before) for before, after in pairs)
    assert any(asked.seconds(after) < 0.99 * asked.seconds(before) for before, after in pairs)
