"""From a graph to a plan: it is legal, fits, is as fast as its augmented graph says, and no plan beats the bound."""

import gc
import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.flows.training.choice.searched_plan import summary
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Efficiency, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.bytes import usable_bytes
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.planner import attempts
from prefect_rlhf.placement.planner.attempts import NEARLY
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import ROUNDING, Planned
from prefect_rlhf.placement.planner.preset_plan import preset_result
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.candidates import CostContext, candidate, fitting_candidates
from prefect_rlhf.placement.planner.space.mesh_space import MeshSpace, meshes_of
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.plans.presets import PRESETS, cut
from prefect_rlhf.placement.schedule.estimate import estimate
from prefect_rlhf.placement.schedule.schedule import schedule
from prefect_rlhf.placement.search.driver import prove
from prefect_rlhf.placement.search.problem import PlannedCall, Problem
from tests.support.cases import combinations, examples, first
from tests.support.strategies import GIB, SMOLLM2, TWO_DEVICES, critic_first, dpo, model, plans, ppo, remax, uneven

WORKLOAD = Workload.fixed(128, 128)
SOURCES = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 2, efficiency=Efficiency(call_seconds=0.05)), 1)


def larger(graph: DataflowGraph) -> DataflowGraph:
    """The graph with models of 135 million parameters, so that moves take time."""
    models = tuple(model(one.role, one.head, SMOLLM2) for one in graph.models)
    return replace(graph, models=models)


def question(
    graph: DataflowGraph,
    cluster: ClusterShape = TWO_DEVICES,
    workload: Workload = WORKLOAD,
    sources: CostSources = SOURCES,
) -> Question:
    return Question(graph, Site(cluster, cluster.whole, sources), workload)


def problem_of(graph: DataflowGraph) -> Problem:
    """What the search is asked."""
    return PlanSpace.of(question(graph)).least.problem


GRAPHS = {
    "ppo": larger(ppo()),
    "ppo with evaluation": larger(ppo(evaluate_every=2)),
    "ppo one step off": larger(ppo(staleness=1)),
    "remax": larger(remax()),
    "dpo": larger(dpo()),
    "critic first": larger(critic_first()),
    "ppo of seven rows": larger(uneven(ppo(mini_batches=2))),
}

BRIEFLY = combinations(GRAPHS, briefly=[("ppo",), ("remax",)])


@cache
def planned(name: str) -> Planned:
    return plan_graph(question(GRAPHS[name]), budget_seconds=0.5)


@pytest.mark.parametrize("name", BRIEFLY)
def test_the_plan_is_legal_and_its_certificate_says_that_it_fits(name):
    found = planned(name)
    assert check_plan(found.plan, GRAPHS[name], TWO_DEVICES.whole) is found.plan
    assert found.certificate.fits


@pytest.mark.parametrize("name", BRIEFLY)
def test_no_preset_is_faster_than_the_answer_which_takes_little_more_than_the_fastest_plan(name):
    found = planned(name)
    assert [one.name for one in found.presets] == list(PRESETS)
    timed = [one.estimate.seconds for one in found.presets if one.estimate is not None]
    assert timed and min(timed) >= found.seconds * (1 - ROUNDING)
    assert found.fastest_seconds >= found.seconds / (1 + NEARLY)
    assert sum(found.gap_parts.values()) == pytest.approx(found.gap)


@pytest.mark.parametrize("name", ["ppo", "remax", "dpo"])
def test_the_estimate_is_the_time_of_the_plans_augmented_graph(name):
    """Counted here by hand: from the end of one step in the middle of many to that of the tenth after it."""
    graph, found = GRAPHS[name], planned(name)
    costs = NodeCosts(graph, found.plan, WORKLOAD, SOURCES)
    slots = schedule(augment(graph, found.plan, 30), costs.seconds).slots
    first, last = (max(one.end for one in slots if one.node.step == step) for step in (10, 20))
    assert found.seconds == pytest.approx((last - first) / 10)
    assert found.estimate.cold_seconds == pytest.approx(max(one.end for one in slots if one.node.step <= 5))


@pytest.mark.parametrize("name", BRIEFLY)
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_drawn_plan_takes_less_than_the_bound(name, data):
    """Whatever its meshes, strategies, orders and offloads: legal plans that the search knew nothing of."""
    drawn = data.draw(plans(GRAPHS[name], TWO_DEVICES))
    assert estimate(GRAPHS[name], drawn, WORKLOAD, SOURCES).seconds >= planned(name).lower_bound_seconds * (1 - 1e-9)


@pytest.mark.parametrize("name", BRIEFLY)
@given(data=st.data())
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_candidate_holds_its_stated_bytes(name, data):
    """Every device of a call's mesh has the least at some moment, and one the most: what needs more can never fit."""
    asked = question(GRAPHS[name])
    context = CostContext.of(asked)
    drawn = data.draw(plans(GRAPHS[name], TWO_DEVICES))
    peaks = {DeviceMesh.parse(peak.device): peak.num_bytes for peak in asked.certificate(drawn).peaks}
    for call in context.graph:
        if call.kind == "compute":
            continue
        one = candidate(call, drawn[call.name], context)
        held = [peaks[DeviceMesh(device.node, 1, device.index, 1)] for device in drawn[call.name].mesh.devices()]
        assert min(held) >= one.least.peak and max(held) >= one.most.peak, call.name


def test_evaluation_uses_the_copies_of_weights_of_the_calls_like_it():
    placed = planned("ppo with evaluation").plan
    for evaluation, sibling in (("evaluate_generate", "actor_generate"), ("evaluate_scores", "reward_inference")):
        ours, theirs = placed[evaluation], placed[sibling]
        assert (ours.mesh, ours.strategy, ours.engine) == (theirs.mesh, theirs.strategy, theirs.engine)


def test_evaluation_is_not_part_of_the_problem():
    """So it changes no bound: the search sees the same calls, moves and waits."""
    posed, plain = (problem_of(GRAPHS[name]) for name in ("ppo with evaluation", "ppo"))
    assert [node.name for node in posed.nodes] == [node.name for node in plain.nodes]
    assert (posed.calls, posed.edges, posed.meshes) == (plain.calls, plain.edges, plain.meshes)


def test_meshes_are_aligned_slices_of_a_node_and_whole_nodes_in_a_row():
    cluster = ClusterShape("two nodes", 2, 4, GIB)
    slices = [f"n{node}:{devices}" for devices in ("0", "1", "2", "3", "0-1", "2-3") for node in (0, 1)]
    found = [mesh.name for mesh in meshes_of(cluster, cluster.whole)]
    assert sorted(found) == sorted([*slices, "n0:0-3", "n1:0-3", "n0-1:0-3"])
    assert all(cluster.check_mesh(mesh) for mesh in meshes_of(cluster, cluster.whole))


def test_of_many_nodes_meshes_of_round_numbers_are_searched_and_the_others_are_named():
    """Halves of the lease, which presets need, are among them whatever its size."""
    cluster = ClusterShape("many nodes", 50, 8, GIB)
    hardware = Hardware(DATASHEETS["h100"], 8, NETWORKS["roce-3200"])
    space = MeshSpace.of(cluster, cluster.whole, CostSources.equal_nodes(hardware, 50))
    counts = {mesh.num_nodes for mesh in space.meshes}
    assert {*range(1, 9), 10, 12, 14, 16, 20, 24, 25, 28, 32, 40, 48, 50} <= counts
    assert "meshes of 9, 11, 15, 17, ... nodes" in space.left_out
    assert all(cut(cluster.whole, 0.5)[part] in space.meshes for part in (0, 1))


def test_a_plan_over_two_nodes_is_found():
    cluster = ClusterShape("two nodes", 2, 2, 80 * GIB)
    sources = CostSources.equal_nodes(replace(SOURCES.nodes[0], network=NETWORKS["roce-3200"]), 2)
    found = plan_graph(question(GRAPHS["remax"], cluster, sources=sources), budget_seconds=0.5)
    assert check_plan(found.plan, GRAPHS["remax"], cluster.whole)
    assert found.lower_bound_seconds <= found.seconds <= 1.005 * planned("remax").seconds


@pytest.mark.parametrize(
    ("nodes", "devices", "halves"), first(1, [(3, 2, True), (1, 3, False), (1, 6, False), (5, 6, True)])
)
def test_any_number_of_nodes_and_devices_is_planned_and_presets_without_halves_are_left_out(nodes, devices, halves):
    """Half of six devices is no mesh, so presets of halves have no plan there; whole nodes are cut anywhere."""
    cluster = ClusterShape("odd", nodes, devices, 8 * GIB)
    hardware = Hardware(DATASHEETS["h100"], devices, NETWORKS["roce-3200"])
    rows = plan_graph(question(ppo(), cluster, sources=CostSources.equal_nodes(hardware, nodes)), 0.2).rows()
    seconds = {row["plan"]: row["seconds"] for row in rows}
    assert halves == ("split" in seconds) and seconds.get("split") != "-"
    assert "flattening" in seconds


def test_reals_heuristic_has_reals_micro_batches():
    """Of 16,384 tokens a device in every call: 1024 rows of 256 on two devices make 8."""
    rows = replace(ppo(), calls=tuple(replace(call, num_rows=1024) for call in ppo()))
    result = preset_result(question(rows), "real-heuristic")
    assert result.plan is not None
    cuts = {result.plan[call.name].micro_batches for call in rows if call.kind != "compute" and call.every is None}
    assert cuts == {8}


@pytest.mark.parametrize("name", first(1, ["remax", "ppo"]))
def test_staleness_never_makes_a_plan_slower(name):
    """What waits for less can be planned as if it waited."""
    stale = replace(GRAPHS[name], staleness=1)
    found = plan_graph(question(stale), budget_seconds=0.5)
    assert found.lower_bound_seconds <= found.seconds <= planned(name).seconds * (1 + 1e-3)


@pytest.mark.parametrize("name", ["ppo", "remax"])
def test_the_answer_is_no_slower_than_a_plan_to_start_from(name):
    """Even after a search of nothing."""
    start = replace(planned(name).plan, name="mine")
    found = plan_graph(question(GRAPHS[name]), evaluations=1, start=start)
    assert found.seconds <= planned(name).seconds * (1 + ROUNDING)
    assert found.plan.name == "auto"


def test_a_plan_to_start_from_that_leaves_a_pinned_mesh_is_not_the_answer():
    start, pins = planned("dpo").plan, {"actor_train_step": DeviceMesh(0, 1, 0, 1)}
    assert start["actor_train_step"].mesh != pins["actor_train_step"]
    found = plan_graph(question(GRAPHS["dpo"]), evaluations=1000, start=start, pins=pins)
    assert found.plan["actor_train_step"].mesh == pins["actor_train_step"]


def test_a_plan_below_its_bound_is_reported():
    """An estimate or a bound that is wrong is not hidden in a gap of nothing."""
    found = replace(planned("dpo"), lower_bound_seconds=2 * planned("dpo").seconds)
    assert found.beats_bound and not planned("dpo").beats_bound
    assert "BELOW the bound" in summary(found) and "BELOW" not in summary(planned("dpo"))


def test_a_proof_of_a_bound_that_is_too_high_shows(monkeypatch):
    """All calls of the proof take three times as long, so the plan that was found is below the bound."""

    def too_slow(problem, *limits):
        def slow(option):
            return replace(option, microseconds=3 * option.microseconds)

        nodes = [
            replace(node, options=tuple(map(slow, node.options))) if isinstance(node, PlannedCall) else node
            for node in problem.nodes
        ]
        return prove(replace(problem, nodes=tuple(nodes)), *limits)

    monkeypatch.setattr(attempts, "prove", too_slow)
    found = plan_graph(question(GRAPHS["dpo"]), evaluations=1000)
    assert found.beats_bound
    assert "BELOW the bound" in summary(found)


def test_no_garbage_is_collected_during_a_search_and_again_after_it():
    enabled = []
    plan_graph(question(GRAPHS["dpo"]), evaluations=1000, progress=lambda _: enabled.append(gc.isenabled()))
    assert gc.isenabled() and set(enabled) == {False}


def test_a_search_without_a_proof_has_the_same_plan():
    """Of a plan that only replaces another, nobody reads the bound."""
    proven, found = (plan_graph(question(GRAPHS["remax"]), evaluations=2000, proves=each) for each in (True, False))
    assert found.plan == proven.plan
    assert found.lower_bound_seconds == found.search.lower_bound_seconds


def test_a_large_gap_is_split_into_search_and_bound():
    """No search raises a bound beyond the bound of a plan, so the bound leaves out the rest."""
    found = planned("dpo")
    least = {"lower_bound_seconds": 0.5 * found.seconds, "provable_seconds": 0.6 * found.seconds}
    large = replace(found, **least, fastest_seconds=found.seconds)
    (line,) = [line for line in summary(large).splitlines() if line.startswith("of this a longer search")]
    assert (
        "explain at most 20.0% by a higher bound" in line and "for the other 80.0% either the bound leaves out" in line
    )
    (line,) = [
        line
        for line in summary(replace(large, provable_seconds=found.seconds)).splitlines()
        if line.startswith("of this a longer search")
    ]
    assert "explain at most 100.0% by a higher bound" in line and "for the other" not in line
    assert "of this a longer search" not in summary(replace(found, lower_bound_seconds=found.seconds))


@pytest.mark.parametrize("budget", [0, -1.0, float("nan")])
def test_a_budget_that_is_not_positive_is_refused(budget):
    with pytest.raises(InvalidInput, match="budget_seconds: got .*, expected more than 0 seconds"):
        plan_graph(question(GRAPHS["dpo"]), budget_seconds=budget)


def test_a_model_that_no_device_holds_is_refused():
    tiny = replace(TWO_DEVICES, device_memory_bytes=GIB // 4)
    with pytest.raises(InvalidInput, match="GiB on a device at best"):
        plan_graph(question(GRAPHS["dpo"], tiny))


def large(rows: int) -> DataflowGraph:
    """PPO of models of 7B."""
    models = tuple(replace(one, shape=known_shape("llama3-7b"), dtype="bfloat16") for one in ppo().models)
    return replace(ppo(), models=models, calls=tuple(replace(call, num_rows=rows) for call in ppo()))


def test_a_plan_that_no_device_has_room_for_says_how_much_is_missing():
    """Each call of a step would fit an empty device; the train_step beside what else stays there does not."""
    node = ClusterShape("node", 1, 2, int(72.25 * GIB))
    with pytest.raises(PlanDoesNotFit, match=r"expected .* GiB .*; save .* by more or larger devices") as error:
        plan_graph(question(large(32), node, Workload.fixed(256, 256)), budget_seconds=0.5)
    (remedy,) = json.loads(error.value.details)["remedies"]
    assert remedy["fits"] and remedy["peak_bytes"] > usable_bytes(int(72.25 * GIB), "cuda")
    assert f"{remedy['change']}: peak" in error.value.report


@pytest.mark.all  # the next but one has a small cache
def test_a_cache_smaller_than_all_rows_is_allowed():
    """2048 rows of 2048 tokens have 512 GiB of keys and values; the plan keeps fewer in flight."""
    node = ClusterShape("node", 1, 8, 80 * GIB)
    sources = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 8), 1)
    found = plan_graph(question(large(2048), node, Workload.fixed(1024, 1024), sources), budget_seconds=0.5)
    assert found.certificate.fits
    assert (found.plan["actor_generate"].engine, found.plan["actor_generate"].cache_gib is None) == ("vllm", False)


def test_a_cache_is_for_rows_as_they_are_expected_to_grow():
    """Of a thousand responses one is long: a plan has no room for a thousand of its length."""
    node = ClusterShape("node", 1, 8, 80 * GIB)
    sources = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 8), 1)
    tail = LengthDistribution.of({128: 999, 4096: 1})
    asked = question(large(1024), node, Workload(LengthDistribution.fixed(128), tail), sources)
    context = CostContext.of(asked)
    caches = [
        option.placement.cache_gib
        for option in fitting_candidates(context.graph.call("actor_generate"), context)
        if (option.placement.engine, option.placement.strategy) == ("vllm", Strategy(8))
    ]
    assert max(cache for cache in caches if cache) * GIB < 2 * 128 * (128 + 128 + 32) * 512 * 1024
    assert None not in caches


@pytest.mark.all
def test_what_sleeps_between_uses_makes_room_for_a_cache():
    """PPO of 7B on four devices, each of which holds little more than a cache: nothing of that plan may stay awake."""
    node = ClusterShape("node", 1, 4, 80 * GIB)
    sources = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 4), 1)
    asked = question(large(256), node, Workload.fixed(512, 512), sources)
    found = plan_graph(asked, budget_seconds=1.0)
    awake = tuple((name, replace(placement, offload="none")) for name, placement in found.plan.placements)
    assert "all" in {placement.offload for _, placement in found.plan.placements if placement.engine == "vllm"}
    assert found.certificate.fits and not asked.fits(replace(found.plan, placements=awake))
    assert found.lower_bound_seconds <= found.seconds
