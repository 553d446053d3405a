"""A plan that does not fit is made to fit by taking away what is in the way, and nothing else of it changes."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.solution import fitting, made_to_fit, repaired
from tests.placement.planner.test_planner import GRAPHS, question
from tests.support.cases import examples
from tests.support.strategies import GIB, plans

LARGE = ClusterShape("large", 1, 2, 80 * GIB)
FOUR = ClusterShape("four", 1, 4, 8 * GIB)


def too_small(plan: ExecutionPlan, name: str) -> Question:
    """The question on devices that have a little less memory than the plan needs."""
    enough = LARGE.device_memory_bytes
    fullest = question(GRAPHS[name], LARGE).certificate(plan).fullest
    assert fullest is not None
    for thousandths in range(fullest.num_bytes * 1000 // enough + 50, 0, -1):
        cluster = replace(LARGE, device_memory_bytes=enough * thousandths // 1000)
        asked = question(GRAPHS[name], cluster)
        if not asked.fits(replace(plan, cluster=cluster)):
            return asked
    raise AssertionError("it fits everywhere")


def test_what_fits_stays_as_it_is():
    asked = question(GRAPHS["dpo"], LARGE)
    plan = preset("flattening", GRAPHS["dpo"], LARGE, LARGE.whole)
    assert repaired(asked, plan) == made_to_fit(asked, plan) == plan


def test_only_the_model_in_the_way_leaves():
    """With a little less memory than all of it takes the reference model leaves, and the trained one stays."""
    plan = preset("flattening", GRAPHS["dpo"], LARGE, LARGE.whole)
    asked = too_small(plan, "dpo")
    smaller = replace(plan, cluster=asked.site.cluster)
    mended = repaired(asked, smaller)
    assert not asked.fits(smaller) and mended is not None and asked.fits(mended)
    assert mended["ref_inference"].offload == "all" and mended["actor_train_step"] == plan["actor_train_step"]


@given(data=st.data())
@settings(max_examples=examples(25), deadline=None)
def test_a_repaired_plan_fits_and_has_the_meshes_and_strategies_it_had(data):
    plan = data.draw(plans(GRAPHS["ppo"], FOUR))
    asked = question(GRAPHS["ppo"], replace(FOUR, device_memory_bytes=5 * GIB))
    mended = repaired(asked, replace(plan, cluster=asked.site.cluster))
    if mended is not None:
        assert asked.fits(mended)
        assert all(
            replace(placed, offload="none", prefetch=True) == replace(plan[name], offload="none", prefetch=True)
            for name, placed in mended.placements
        )


@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_a_plan_made_to_fit_is_no_slower_than_without_prefetch(data):
    asked = question(GRAPHS["remax"], replace(FOUR, device_memory_bytes=5 * GIB))
    plan = replace(data.draw(plans(GRAPHS["remax"], FOUR)), cluster=asked.site.cluster)
    late, made = fitting(asked, plan), made_to_fit(asked, plan)
    assert made is not None or late is None
    assert made is None or asked.fits(made)
    assert late is None or asked.seconds(made or plan) <= asked.seconds(late)
