"""Recomputed layers in the searched space: the bound knows every number of them, and answers have as few as fit."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.plan import Placement, recomputed_layers
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.candidates import CostContext, candidate, fitting_candidates
from prefect_rlhf.placement.plans.check import violations
from tests.placement.planner.test_planner import GRAPHS, question
from tests.support.strategies import GIB, TWO_DEVICES, dpo, model, placed

TRAIN = "actor_train_step"
LAYERS = 30  # of each model of GRAPHS
LONG = Workload.fixed(1024, 3072)


def in_memory(gib: float) -> Question:
    """DPO of 135 million parameters on two devices, with rows so long that saved activations fill them."""
    return question(GRAPHS["dpo"], replace(TWO_DEVICES, device_memory_bytes=int(gib * GIB)), LONG)


@cache
def planned(gib: float) -> Planned:
    return plan_graph(in_memory(gib), evaluations=20_000)


def larger_question() -> CostContext:
    """DPO of 13B on two nodes, where memory binds."""
    shape = known_shape("llama-13b")
    rows = (replace(call, num_rows=128) for call in dpo())
    graph = replace(dpo(), models=tuple(model(m.role, m.head, shape) for m in dpo().models), calls=tuple(rows))
    cluster = ClusterShape("two", 2, 8, 80 * GIB)
    sources = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 8, NETWORKS["roce-3200"]), 2)
    return CostContext.of(question(graph, cluster, Workload.fixed(512, 512), sources))


def test_every_number_of_layers_is_bounded_by_a_candidate():
    """A candidate on the same devices takes no longer and needs no more bytes, by what the bound counts."""
    context = larger_question()
    call = context.graph.call(TRAIN)
    found = fitting_candidates(call, context)
    alike = {replace(option.placement, micro_batches=1, recompute=0) for option in found}
    assert {option.placement.recompute for option in found} >= {0, "all"}
    for kind in sorted(alike, key=str)[::7]:
        group = [o for o in found if replace(o.placement, micro_batches=1, recompute=0) == kind]
        stage = -(-40 // kind.strategy.pp)
        for cuts, count in product((1, 2, 8, 64), (0, 1, stage // 3, stage // 2 + 1, stage - 1, stage)):
            plain = replace(kind, micro_batches=cuts, recompute=count, offload="none")
            if any(violations(call, plain, context.graph, context.site.backend)):
                continue
            stated = candidate(call, plain, context)
            if context.needed_bytes(stated) <= context.usable_bytes(group[0].mesh_class):
                assert any(
                    option.seconds - option.spared_seconds <= stated.seconds
                    and option.least.peak <= stated.least.peak
                    and option.fullest_bytes <= stated.fullest_bytes
                    for option in group
                ), plain


def test_the_first_candidate_that_fits_stands_for_no_fewer_layers_than_fit_an_empty_device():
    """So it spares the time of all layers down to these, and none that no plan spares."""
    context = larger_question()
    call = context.graph.call(TRAIN)
    checked = 0
    for option in fitting_candidates(call, context)[::5]:
        plain, layers = option.placement, -(-40 // option.placement.strategy.pp)
        count = recomputed_layers(plain.recompute, layers)
        if plain.offload == "none" and count:
            fewer = [candidate(call, replace(plain, recompute=number), context) for number in range(count)]
            fitting = {number: other.seconds for number, other in enumerate(fewer) if context.fits(other)}
            if not any(-(-layers * rung // 4) in fitting for rung in range(4)):
                least = min(fitting.values(), default=option.seconds)
                assert option.seconds - option.spared_seconds == pytest.approx(least, rel=1e-9)
                checked += bool(fitting)
    assert checked


def every_plan(asked: Question):
    """All pairs of placements that stay in memory, the train_step with several numbers of recomputed layers."""
    context = CostContext.of(asked)
    ref, train = (context.graph.call(name) for name in ("ref_inference", TRAIN))

    def ways(call, counts) -> list[Placement]:
        plain = dict.fromkeys(
            replace(option.placement, mesh=mesh, recompute=0, offload="none", micro_batches=cuts)
            for option in fitting_candidates(call, context)
            for mesh in context.space.meshes
            if mesh.num_devices == option.placement.mesh.num_devices
            for cuts in (1, 2)
        )
        each = (replace(way, recompute=count) for way, count in product(plain, counts))
        return [way for way in each if not any(violations(call, way, context.graph, context.site.backend))]

    for where, trains in product(ways(ref, (0,)), ways(train, (0, 1, 11, 14, 15, 29, "all"))):
        yield asked.plan("stated", {"ref_inference": where, TRAIN: trains})


@pytest.mark.parametrize("gib", [14.0, pytest.param(11.0, marks=pytest.mark.all), 9.0])
def test_no_plan_with_recomputation_beats_the_bound(gib):
    """Of all pairs of placements; some of them fit because they recompute, and some without."""
    asked, found = in_memory(gib), planned(gib)
    fitting = [plan for plan in every_plan(asked) if asked.fits(plan)]
    assert any(plan[TRAIN].recompute for plan in fitting)
    fastest = min(map(asked.seconds, fitting))
    assert fastest >= found.lower_bound_seconds * (1 - 1e-9)
    assert found.seconds <= fastest * 1.03


def test_a_train_step_recomputes_no_more_than_necessary():
    """Without recomputation, or with a layer less of each stage, the plan does not fit."""
    asked, plan = in_memory(9.0), planned(9.0).plan
    layers = recomputed_layers(plan[TRAIN].recompute, -(-LAYERS // plan[TRAIN].strategy.pp))
    assert layers > 0 and asked.fits(plan)
    assert not any(asked.fits(placed(plan, TRAIN, recompute=fewer)) for fewer in (0, layers - 1))


def test_no_layer_is_recomputed_if_memory_suffices():
    assert planned(80.0).plan[TRAIN].recompute == 0


def test_what_does_not_fit_with_recomputation_is_refused_with_it():
    with pytest.raises(InvalidInput, match=r"recompute all"):
        planned(4.7)
