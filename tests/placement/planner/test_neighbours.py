"""Local search from a plan: calls move one at a time."""

import pytest

from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.neighbours import improve_locally
from prefect_rlhf.placement.search.budget import Budget, Meter
from tests.placement.planner.test_planner import GRAPHS, planned, question


def slowest_preset(name: str) -> ExecutionPlan:
    return max(
        (one for one in planned(name).presets if one.plan and one.estimate), key=lambda one: one.estimate.seconds
    ).plan


@pytest.mark.parametrize("name", ["ppo", "remax"])
def test_an_improved_plan_fits_and_is_faster(name):
    start, asked = slowest_preset(name), question(GRAPHS[name])
    improved = improve_locally(asked, start, planned(name).space, Meter(Budget(evaluations=200_000)))
    assert asked.fits(improved) and asked.seconds(improved) < asked.seconds(start)
