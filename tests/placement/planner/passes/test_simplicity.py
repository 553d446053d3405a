"""Of plans that take nearly the same time the simplest is the answer, and what simplicity costs is bounded."""

import pytest

from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.planner.attempts import NEARLY
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.passes.simplicity import complexity, simplest
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.placement.planner.test_planner import GRAPHS, planned, question
from tests.support.cases import first
from tests.support.strategies import GIB, placed

LARGE = ClusterShape("large", 1, 2, 80 * GIB)


def test_each_thing_that_has_to_be_said_of_a_plan_counts_once():
    """Flattening: one mesh, one strategy. The reference on half of it: another mesh, its strategy, then an offload."""
    asked = question(GRAPHS["ppo"], LARGE)
    plan = preset("flattening", GRAPHS["ppo"], LARGE, LARGE.whole)
    counts = []
    for changes in ({}, {"mesh": "n0:0", "dp": 1}, {"offload": "all"}):
        plan = placed(plan, "ref_inference", **changes)
        counts.append(complexity(asked, plan, asked.certificate(plan)))
    assert counts == [2, 4, 5]


@pytest.mark.parametrize("name", first(1, GRAPHS))
def test_the_simplest_plan_fits_and_takes_little_longer(name):
    asked, found = question(GRAPHS[name]), planned(name)
    others = [(one.plan, one.estimate.seconds) for one in found.presets if one.plan is not None]
    chosen = simplest(asked, found.space, found.plan, others)
    assert asked.fits(chosen)
    assert asked.seconds(chosen) <= asked.seconds(found.plan) * (1 + NEARLY)
    counts = [complexity(asked, plan, asked.certificate(plan)) for plan in (chosen, found.plan)]
    assert counts[0] <= counts[1]


def test_with_simplicity_0_the_answer_is_the_fastest_plan_that_was_found():
    found = plan_graph(question(GRAPHS["ppo"]), budget_seconds=0.5, simplicity=0.0)
    assert found.seconds == found.fastest_seconds


def test_a_simple_plan_that_depends_on_a_constant_is_not_chosen():
    """The simplest of the nearly fastest plans has a regret of 20%; then all plans do, and it is the answer again."""
    asked, found = question(GRAPHS["ppo"]), planned("ppo")
    others = [(plan, asked.seconds(plan)) for plan in found.finalists]
    simple = simplest(asked, found.space, found.plan, others)

    def regret(plan):
        return 0.2 if plan.placements == simple.placements else 0.0

    steady = simplest(asked, found.space, found.plan, [*others, (simple, asked.seconds(simple))], regret=regret)
    assert steady.placements != simple.placements
    assert simplest(asked, found.space, found.plan, others, regret=lambda _: 0.2) == simple
