"""Nodes that differ in kind, memory, speed and network: what they cost and hold, and where plans put calls."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware, Network, relative_speeds
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.uneven import placed_cost, replica_works
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.memory.certificate import certify
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.model import Experts
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.candidates import CostContext, fitting_candidates
from prefect_rlhf.placement.planner.space.mesh_space import MeshSpace
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.planner.space.restrictions import divisions
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.schedule.estimate import estimate
from tests.support.cases import examples
from tests.support.strategies import GIB, SMOLLM2, model, on, plans, ppo, remax

ETHERNET = Network("ethernet-200", 25e9)
A100, V100 = (Hardware(DATASHEETS[kind], 8, ETHERNET) for kind in ("a100-80", "v100-32"))
ALONE = ClusterShape("alone", 1, 8, 80 * GIB)
BOTH = ClusterShape("both", 2, 8, 32 * GIB, relative_speeds((A100, V100)), (80 * GIB, 32 * GIB))
SOURCES = {ALONE: CostSources((replace(A100, network=None),)), BOTH: CostSources((A100, V100))}
APPS_LENGTHS = Workload.fixed(256, 256)
SIZES = ModelSizes.of_shape(KNOWN_SHAPES["llama-7b"])
TWO_NODES = DeviceMesh.parse("n0-1:0-7")

SMALL_NODES = ClusterShape("small", 2, 2, 8 * GIB, (1.0, 0.401), (8 * GIB, 4 * GIB))
SMALL_SOURCES = CostSources((replace(A100, devices_per_node=2), replace(V100, devices_per_node=2)))


def with_shape(graph, shape):
    """The graph with models of one shape."""
    return replace(graph, models=tuple(model(one.role, one.head, shape) for one in graph.models))


PPO_33B = with_shape(ppo(), KNOWN_SHAPES["llama-33b"])
MIXTURE = replace(SMOLLM2, family="mixtral", intermediate_size=192, experts=Experts(8, 2))
SMALL_GRAPHS = {
    "ppo": with_shape(ppo(), SMOLLM2),
    "remax": with_shape(remax(), SMOLLM2),
    "remax of experts": with_shape(remax(), MIXTURE),
}


def question(graph, cluster=SMALL_NODES, sources=SMALL_SOURCES, workload=APPS_LENGTHS) -> Question:
    return Question(graph, Site(cluster, cluster.whole, sources), workload)


@cache
def planned_33b(cluster: ClusterShape) -> Planned:
    """APP's table III with 8 rows: four models of 33B."""
    return plan_graph(question(PPO_33B, cluster, SOURCES[cluster]), budget_seconds=4)


@cache
def planned_small(name: str) -> Planned:
    return plan_graph(question(SMALL_GRAPHS[name], workload=Workload.fixed(128, 128)), 0.5)


def kinds_used(found: Planned, call: str) -> set[int]:
    """The nodes of a call's mesh: 0 has A100s, 1 has V100s."""
    return {device.node for device in found.plan[call].mesh.devices()}


@pytest.mark.parametrize("memory", [(GIB,), (GIB, 0), (GIB, -1), (GIB, 1.5)])
def test_a_memory_for_each_node_above_0(memory):
    with pytest.raises(InvalidInput, match=r"node_memory_bytes: got \[.*\], expected .*\Z"):
        SMALL_NODES.with_memory(memory)


def test_a_plan_whose_cluster_has_other_nodes_memory_is_refused():
    plan = replace(planned_small("ppo").plan, cluster=replace(SMALL_NODES, node_memory_bytes=(GIB,)))
    with pytest.raises(InvalidInput, match="cluster.node_memory_bytes"):
        check_plan(plan, SMALL_GRAPHS["ppo"], SMALL_NODES.whole)


@pytest.mark.parametrize(("node", "fits"), [(0, True), (1, False)])
def test_each_device_is_certified_by_its_own_memory(node, fits):
    """Every call on one device: of the node with room for it, and of the node without."""
    graph, cluster = SMALL_GRAPHS["ppo"], replace(SMALL_NODES, node_memory_bytes=(24 * GIB, 4 * GIB))
    engines = {"generate": "vllm", "compute": "python"}
    placements = tuple((call.name, on(f"n{node}:0", engines.get(call.kind, "megatron"))) for call in graph)
    certificate = certify(augment(graph, ExecutionPlan("one", cluster, placements), 3), Workload.fixed(8, 8), "cuda")
    assert certificate.fits is fits
    assert certificate.device_bytes == cluster.node_memory_bytes[node]


def test_meshes_of_other_kinds_are_of_other_classes():
    space = MeshSpace.of(BOTH, BOTH.whole, SOURCES[BOTH])
    nodes_of = [{space.meshes[index].first_node for index in members} for members in space.classes]
    assert sorted(map(sorted, nodes_of)) == [[0]] * 5 + [[1]] * 4  # 1, 2, 4, 8 devices of each; both nodes begin at 0
    same = MeshSpace.of(replace(BOTH, node_speeds=(), node_memory_bytes=()), BOTH.whole, CostSources((A100, A100)))
    assert len(same.classes) == 5


def test_a_call_may_use_only_the_devices_that_have_room_for_it():
    """A 33B model's weights fit two A100s of 80 GB, and no two V100s of 32 GB."""
    context = CostContext.of(question(PPO_33B, BOTH, SOURCES[BOTH]))
    found = fitting_candidates(PPO_33B.call("ref_inference"), context)
    fewest = {
        node: min(one.placement.mesh.num_devices for one in found if one.placement.mesh.first_node == node)
        for node in (0, 1)
    }
    assert fewest == {0: 1, 1: 4}


def test_rows_dealt_by_speed_end_earlier_than_rows_dealt_equally():
    work = CallWork("inference", 1024, Workload.fixed(300, 500))
    placement = Placement(TWO_NODES, Strategy(dp=2, tp=8), "megatron")
    equal, by_speed = (placed_cost(work, SIZES, placement, SOURCES[BOTH], s).total for s in ((), BOTH.node_speeds))
    assert equal == SOURCES[BOTH].call_cost(work, Execution.of(placement), SIZES, TWO_NODES).total
    assert by_speed < 0.8 * equal


def test_a_replica_across_both_kinds_is_as_slow_as_the_slower():
    """A pipeline over both nodes has V100s in every replica, so speeds change nothing."""
    work = CallWork("inference", 64, Workload.fixed(300, 500))
    placement = Placement(TWO_NODES, Strategy(dp=2, tp=4, pp=2), "megatron")
    found = placed_cost(work, SIZES, placement, SOURCES[BOTH], BOTH.node_speeds)
    assert found == SOURCES[BOTH].call_cost(work, Execution.of(placement), SIZES, TWO_NODES)


def test_between_nodes_the_slower_network_counts():
    fast = replace(A100, network=NETWORKS["roce-3200"])
    mixed, slow = CostSources((fast, A100)), CostSources((A100, A100))
    work, execution = CallWork("train_step", 64, Workload.fixed(300, 500)), Execution(Strategy(16), 2, 8)
    assert mixed.call_cost(work, execution, SIZES, TWO_NODES) == slow.call_cost(work, execution, SIZES, TWO_NODES)
    assert mixed.links([TWO_NODES]).network == slow.links([TWO_NODES]).network


def test_the_certificate_counts_the_rows_that_a_fast_replica_gets():
    work = CallWork("generate", 16, Workload.fixed(8, 8))
    dealt = replica_works(work, Placement(TWO_NODES, Strategy(dp=2, tp=8), "vllm"), (1.0, 0.34))
    assert [share.rows for share in dealt] == [24, 8]  # 12 and 4, as if both replicas had as many
    shared = replica_works(work, Placement(TWO_NODES, Strategy(dp=2, tp=8, ep=2), "vllm"), (1.0, 0.34))
    assert [share.rows for share in shared] == [24, 24]  # they serve each other's tokens
    graph = SMALL_GRAPHS["ppo"]
    placements = {call.name: on("n0:0", "python") if call.kind == "compute" else None for call in graph}
    spread = {
        name: one or on("n0-1:0-1", "vllm" if "generate" in name else "megatron", dp=4)
        for name, one in placements.items()
    }
    plan = ExecutionPlan("spread", SMALL_NODES, tuple(spread.items()))
    peaks = {peak.device: peak for peak in certify(augment(graph, plan, 3), Workload.fixed(4096, 4096), "cuda").peaks}
    caches = {
        device: sum(s.num_bytes for s in peak.shares if s.what == "key-value cache") for device, peak in peaks.items()
    }
    assert caches["n0:1"] > 2 * caches["n1:0"] > 0


@pytest.mark.parametrize("name", SMALL_GRAPHS)
@given(data=st.data())
@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_drawn_plan_takes_less_than_the_bound(name, data):
    """On nodes of two kinds, whatever its meshes, strategies, orders and offloads."""
    graph, drawn = SMALL_GRAPHS[name], data.draw(plans(SMALL_GRAPHS[name], SMALL_NODES))
    found = estimate(graph, drawn, Workload.fixed(128, 128), SMALL_SOURCES).seconds
    assert found >= planned_small(name).lower_bound_seconds * (1 - 1e-9)


@pytest.mark.all
def test_adding_v100s_to_a100s_shortens_an_iteration():
    """APP's table III; the paper's gain is 14.5%."""
    alone, both = planned_33b(ALONE), planned_33b(BOTH)
    assert alone.certificate.fits and both.certificate.fits
    assert alone.seconds / both.seconds > 1.05
    assert both.lower_bound_seconds <= both.seconds


@pytest.mark.all  # tests/house/test_docs.py runs the page's plan
def test_the_plan_trains_on_a100s_and_keeps_frozen_models_on_v100s_or_in_host_memory():
    found = planned_33b(BOTH)
    assert {frozenset(kinds_used(found, call)) for call in ("actor_train_step", "critic_train_step")} == {
        frozenset({0})
    }
    for frozen in ("ref_inference", "reward_inference"):
        assert kinds_used(found, frozen) == {1} or found.plan[frozen].offload == "all"


def test_pinned_calls_are_where_a_person_wants_them():
    pins = {"ref_inference": DeviceMesh.parse("n1:0"), "critic_train_step": DeviceMesh.parse("n0:1")}
    graph = SMALL_GRAPHS["ppo"]
    found = plan_graph(question(graph), 0.5, pins=pins)
    assert {name: found.plan[name].mesh for name in pins} == pins
    assert found.lower_bound_seconds <= found.seconds


@pytest.mark.parametrize(
    ("call", "mesh", "says"),
    [
        ("ref", "n0:0", "pins.ref: got 'n0:0', expected a call with a model: actor_generate, .*"),
        ("ref_inference", "n2:0", "pins.ref_inference: got 'n2:0', expected a mesh of the lease.*"),
        (
            "actor_train_step",
            "n1:0",
            "pins.actor_train_step: got 'n1:0', expected a mesh that can run it and has the memory",
        ),
    ],
)
def test_impossible_pins_are_refused(call, mesh, says):
    pins = {call: DeviceMesh.parse(mesh)}
    small = replace(SMALL_NODES, node_memory_bytes=(8 * GIB, GIB // 2))
    with pytest.raises(InvalidInput, match=rf"{says}\Z"):
        plan_graph(question(SMALL_GRAPHS["ppo"], small), 0.5, pins=pins)


def test_several_kinds_are_divided():
    """Training on either kind, inference on either; with nodes of one kind there is nothing to divide."""
    graph = SMALL_GRAPHS["remax"]
    for nodes, count in ((SMALL_SOURCES.nodes, 4), (SMALL_SOURCES.nodes[:1] * 2, 0)):
        cluster = replace(SMALL_NODES, node_memory_bytes=(8 * GIB, 8 * GIB))
        space = PlanSpace.of(question(graph, cluster, CostSources(nodes)))
        assert len(list(divisions(space))) == count


@pytest.mark.all
def test_one_command_reproduces_apps_table_iii():
    """Its last line: throughput of the A100s alone, of APP's placement and of the best found, and the gains."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.planner.heterogeneous",
        "--batch-sizes",
        "16",
        "--evaluations",
        "100000",
    ]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True, timeout=600
    )
    found = json.loads(done.stdout.splitlines()[-1])
    rates = {row["setting"]: row["samples_per_second"] for row in found["rows"]}
    assert rates["a100 alone"] < rates["app"] < 1.02 * rates["both kinds"]
    assert found["gains"]["both kinds"] == pytest.approx(rates["both kinds"] / rates["a100 alone"] - 1)
    assert found["paper"] == pytest.approx(0.1449, abs=1e-4)
