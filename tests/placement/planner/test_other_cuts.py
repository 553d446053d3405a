"""The plan that is printed has the best numbers of micro-batches, powers of two or not."""

from __future__ import annotations

from prefect_rlhf.placement.mesh import ClusterShape
from prefect_rlhf.placement.planner.candidates import CostContext
from prefect_rlhf.placement.planner.other_cuts import with_other_cuts
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.placement.planner.test_planner import GRAPHS, question
from tests.strategies import GIB, placed

LARGE = ClusterShape("large", 1, 2, 80 * GIB)
TRAIN = "actor_train_step"


def test_more_micro_batches_than_help_become_fewer_of_any_number():
    """Without stages each micro-batch more costs its launches: of 8 rows in 4, 5 to 7, or 3, the fewest are fastest."""
    asked, graph = question(GRAPHS["ppo"], LARGE), GRAPHS["ppo"]
    plan = placed(preset("flattening", graph, LARGE, LARGE.whole), TRAIN, mesh="n0:0", dp=1, micro_batches=4)
    changed = with_other_cuts(asked, plan, CostContext.of(asked))
    assert changed[TRAIN].micro_batches == 3
    assert asked.seconds(changed) < asked.seconds(plan) and asked.fits(changed)


def test_a_plan_that_no_other_number_makes_faster_stays_as_it_is():
    asked, graph = question(GRAPHS["dpo"], LARGE), GRAPHS["dpo"]
    plan = preset("flattening", graph, LARGE, LARGE.whole)
    assert {plan[call.name].micro_batches for call in graph} == {1}
    assert with_other_cuts(asked, plan, CostContext.of(asked)) == plan
