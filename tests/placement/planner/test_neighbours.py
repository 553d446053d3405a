"""Local search from a plan: calls move one at a time."""

import pytest

from prefect_rlhf.placement.planner.neighbours import improve_locally
from prefect_rlhf.placement.search.budget import Budget, Meter
from tests.placement.planner.test_planner import GRAPHS, planned, question


@pytest.mark.parametrize("name", ["ppo", "remax"])
def test_local_search_improves_presets_and_makes_none_slower(name):
    asked, found = question(GRAPHS[name]), planned(name)
    starts = [one.plan for one in found.presets if one.plan and one.estimate and asked.fits(one.plan)]
    improved = [improve_locally(asked, start, found.space, Meter(Budget(evaluations=100_000))) for start in starts]
    pairs = list(zip(starts, improved, strict=True))
    assert all(asked.fits(after) and asked.seconds(after) <= asked.seconds(before) for before, after in pairs)
    assert any(asked.seconds(after) < 0.99 * asked.seconds(before) for before, after in pairs)
