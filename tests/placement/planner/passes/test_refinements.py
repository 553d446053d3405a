"""The plan that is printed has no more micro-batches than help."""

from dataclasses import replace

from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.planner.passes.refinements import with_fewest_cuts
from prefect_rlhf.placement.planner.passes.simplicity import is_nearly_full
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.space.candidates import CostContext
from tests.placement.planner.test_planner import GRAPHS, question
from tests.support.strategies import GIB, placed

LARGE = ClusterShape("large", 1, 2, 80 * GIB)
TRAIN = "actor_train_step"


def test_cuts_that_win_no_time_are_not_made_where_memory_is_free():
    """Of plans that take as long the search has the one of least bytes; in little memory that is right."""
    asked, graph = question(GRAPHS["ppo"], LARGE), GRAPHS["ppo"]
    whole = preset("flattening", graph, LARGE, LARGE.whole)
    cut = placed(whole, TRAIN, micro_batches=4)
    assert asked.seconds(cut) >= asked.seconds(whole)
    assert with_fewest_cuts(asked, cut, CostContext.of(asked)) == whole
    for share in range(100, 50, -1):
        tight = replace(LARGE, device_memory_bytes=asked.certificate(whole).fullest.num_bytes * share // 100)
        asked_tight = question(GRAPHS["ppo"], tight)
        full, less = (is_nearly_full(asked_tight.certificate(replace(plan, cluster=tight))) for plan in (whole, cut))
        if full and not less:
            break
    kept = with_fewest_cuts(asked_tight, replace(cut, cluster=tight), CostContext.of(asked_tight))
    assert full and not less and kept[TRAIN].micro_batches > 1
