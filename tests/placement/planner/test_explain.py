"""Why a plan places each call so: slack against nodes laid out by hand, runners-up against their own estimate."""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

from prefect_rlhf.placement.cost.datasheets.hardware import Efficiency, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.memory.bytes import FRAGMENT_SHARE
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.explain import Explanation, explain
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.schedule.estimate import estimate
from prefect_rlhf.placement.schedule.schedule import slack_seconds
from prefect_rlhf.placement.search.alternatives import alternatives
from prefect_rlhf.placement.search.driver import search
from tests.placement.search import plain
from tests.placement.search.test_driver import two_calls
from tests.support.strategies import GIB, SMOLLM2, TWO_DEVICES, model, placed, ppo

WORKLOAD = Workload.fixed(128, 128)
ROOMY = replace(TWO_DEVICES, device_memory_bytes=16 * GIB)
H100S = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 2, efficiency=Efficiency(call_seconds=0.05)), 1)


def larger(graph):
    """With models of 135 million parameters."""
    return replace(graph, models=tuple(model(one.role, one.head, SMOLLM2) for one in graph.models))


def question(graph, cluster=ROOMY, sources=H100S) -> Question:
    return Question(graph, Site(cluster, cluster.whole, sources), WORKLOAD)


def planned(asked: Question, plan: ExecutionPlan) -> Planned:
    """A plan that no search found, as if one had."""
    space, result = PlanSpace.of(asked), search(two_calls(), 60)
    return Planned(plan, asked.estimate(plan), asked.certificate(plan), 1.0, "", 1.0, result, (), space, 1.0)


@cache
def explained() -> tuple[Question, Planned, tuple[Explanation, ...]]:
    """PPO under the preset that runs everything on all devices."""
    asked = question(larger(ppo()))
    plan = preset("flattening", asked.graph, ROOMY, ROOMY.whole, WORKLOAD.longest)
    flattened = planned(asked, plan)
    return asked, flattened, explain(asked, flattened)


def test_each_call_with_a_model_is_explained():
    asked, flattened, found = explained()
    assert [one.call for one in found] == [call.name for call in asked.graph if call.kind != "compute"]
    assert all(one.placement == flattened.plan[one.call] for one in found)


def test_the_runner_up_differs_in_mesh_or_strategy_and_is_priced_by_its_plan():
    """Put into the plan by hand, it gives the very seconds, and it fits."""
    asked, flattened, found = explained()
    plan = flattened.plan
    assert any(one.runner_up for one in found)
    for one in found:
        if one.runner_up is None:
            continue
        new, old = one.runner_up.placement, one.placement
        assert (new.mesh, new.strategy) != (old.mesh, old.strategy)
        cleared = replace(plan, placements=tuple((name, replace(p, device_order=())) for name, p in plan.placements))
        degrees = {"dp": new.strategy.dp, "tp": new.strategy.tp, "pp": new.strategy.pp}
        changed = placed(
            cleared, one.call, mesh=new.mesh.name, engine=new.engine, micro_batches=new.micro_batches, **degrees
        )
        assert asked.certificate(changed).fits
        assert asked.estimate(changed).seconds == pytest.approx(one.runner_up.iteration_seconds, rel=0.05)
        assert f"{one.runner_up.iteration_seconds - flattened.seconds:+.3f} s an iteration" in one.costs()


def test_under_flattening_every_call_is_on_the_critical_path():
    """All calls take turns on all devices, so none has a second to spare."""
    *_, found = explained()
    assert all("on the critical path: a second more" in one.why() for one in found)


def test_if_a_faster_placement_does_not_fit_memory_binds():
    """A pipeline of two stages without micro-batches holds half of the weights and takes twice the time."""
    slow = replace(DATASHEETS["h100"], bfloat16_flops=1e12)
    sources = CostSources.equal_nodes(Hardware(slow, 2), 1)
    graph, whole = larger(ppo()), ROOMY.whole
    plan = placed(preset("flattening", graph, ROOMY, whole, WORKLOAD.longest), "ref_inference", dp=1, pp=2)
    held = question(graph).certificate(plan).fullest
    filled = sum(share.num_bytes for share in held.shares if share.what != "fragments")
    tight = replace(ROOMY, device_memory_bytes=int(filled / (1 - FRAGMENT_SHARE["cuda"])) + GIB // 64)
    asked = question(graph, tight, sources)
    found = explain(asked, planned(asked, replace(plan, cluster=tight)))
    (bound,) = [one for one in found if one.call == "ref_inference"]
    assert bound.too_large is not None and bound.too_large.peak_bytes > bound.device_bytes
    assert bound.too_large.iteration_seconds < bound.iteration_seconds
    assert "memory binds: n0:0-1 dp2 megatron" in bound.why()


def last_end(slots, seconds):
    """Of nodes that start when what they wait for has ended and their devices are free, in the order of `slots`."""
    ends, free = {}, defaultdict(float)
    for slot in sorted(slots, key=lambda slot: (slot.start, slot.end, slots.index(slot))):
        node = slot.node
        start = max([0.0, *(ends[name] for name in node.depends_on), *(free[one] for one in node.occupies)])
        ends[node.id] = start + seconds[node.id]
        free.update(dict.fromkeys(node.occupies, ends[node.id]))
    return max(ends.values())


def test_a_node_may_take_its_spare_seconds_longer_but_not_more():
    """Each node by itself, against laying out all of them once more with the longer time."""
    graph = larger(ppo(staleness=1))
    plan = preset("side_by_side", graph, ROOMY, ROOMY.whole, WORKLOAD.longest)
    made = estimate(graph, plan, WORKLOAD, H100S, iterations=2).schedule
    seconds = {slot.node.id: slot.seconds for slot in made.slots}
    spare, whole = slack_seconds(made), made.makespan_seconds
    assert last_end(made.slots, seconds) == pytest.approx(whole)
    assert any(value > 0.01 for value in spare.values()) and any(value == 0 for value in spare.values())
    for name, more in spare.items():
        assert last_end(made.slots, seconds | {name: seconds[name] + more}) == pytest.approx(whole)
        assert last_end(made.slots, seconds | {name: seconds[name] + more + 0.01}) == pytest.approx(whole + 0.01)


def test_alternatives_are_ranked_by_makespan_and_include_the_choice():
    """Every (option, mesh) of a small problem, against the plain evaluation."""
    problem = two_calls()
    plan = search(problem, 60).plan
    for call, ranked in alternatives(problem, plan).items():
        found = list(ranked)
        assert [one.makespan_us for one in found] == sorted(one.makespan_us for one in found)
        assert plan[call] in [one.choice for one in found]
        for one in found:
            changed = plan | {call: one.choice}
            assert (one.makespan_us, one.has_room) == (plain.period(problem, changed), plain.fits(problem, changed))
        for most_us in {one.makespan_us - less for one in found for less in (0, 1)}:
            within = [one for one in found if one.makespan_us <= most_us]
            assert list(alternatives(problem, plan, most_us)[call]) == within
