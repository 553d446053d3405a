"""Every node of an augmented graph has a cost: what its call, its rows or its weights take on their devices."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.work import HostCopy
from prefect_rlhf.placement.cost import sources
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.models.weights import num_parameters
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.support.strategies import TWO_DEVICES, placed, ppo

HARDWARE = Hardware(DATASHEETS["h100"], 2)
WORKLOAD = Workload.fixed(64, 64)
GRAPH = ppo()


@pytest.fixture(scope="module")
def plan():
    """PPO on two devices, with the reference model in host memory between its uses."""
    plan = preset("flattening", GRAPH, TWO_DEVICES, TWO_DEVICES.whole)
    placed = tuple(
        (name, replace(old, offload="all") if GRAPH.call(name).role == "ref" else old) for name, old in plan.placements
    )
    return replace(plan, placements=placed)


@pytest.fixture(scope="module")
def costs(plan):
    return NodeCosts(GRAPH, plan, WORKLOAD, CostSources.equal_nodes(HARDWARE, 1))


@pytest.fixture(scope="module")
def nodes(plan):
    return list(augment(GRAPH, plan, 2).nodes)


def test_every_kind_of_node_has_a_cost(costs, nodes):
    """Calls and moves of weights take time, computations are said to take none; rows move where dealings differ."""
    timed = {"generate", "inference", "train_step", "reallocate", "reload"}
    assert {node.kind for node in nodes} >= timed
    for node in nodes:
        if node.kind != "transfer":
            assert (costs.seconds(node) > 0) == (node.kind in timed)


def test_a_node_costs_as_much_as_its_call(costs, nodes, plan):
    for node in nodes:
        if node.kind in ("generate", "inference", "train_step"):
            sizes = ModelSizes.of(GRAPH.model(node.call.role))
            times = DatasheetTimes.of(sizes, HARDWARE)
            expected = call_cost(CallWork.of(node.call, WORKLOAD), Execution.of(plan[node.call.name]), times)
            assert costs.cost(node) == expected


def test_offloading_a_frozen_model_moves_its_weights_over_the_host_link(costs, nodes):
    """Replicas each reload their own copy over their own link, at once. They drop it again in no time."""
    weights = 2 * num_parameters(GRAPH.model("ref"))
    seconds = {node.kind: costs.seconds(node) for node in nodes if node.kind in ("offload", "reload")}
    assert seconds == {"reload": pytest.approx(weights / HARDWARE.links().host + 10e-6), "offload": 0}


def test_a_copy_that_is_overwritten_next_is_not_moved(costs, plan):
    """Trained weights, in contrast, come and go, and so does their optimizer."""
    changed = placed(placed(plan, "actor_generate", offload="all"), "actor_train_step", offload="all")
    of_nodes = replace(costs, plan=changed)
    copies = [node.work for node in augment(GRAPH, changed, 3).of_step(2) if isinstance(node.work, HostCopy)]
    moved = {(work.instance.engine, work.part, work.kind): of_nodes.host_bytes(work) for work in copies}
    weights = 2 * num_parameters(GRAPH.model("actor"))
    assert moved["vllm", "all", "reload"] == moved["vllm", "all", "offload"] == 0
    for part, expected in {"weights": weights, "optimizer": weights * 6 / 2}.items():  # states are shared over dp
        assert moved["megatron", part, "reload"] == pytest.approx(expected)
        assert moved["megatron", part, "offload"] == pytest.approx(expected)


def test_models_of_other_sizes_share_sources_and_no_seconds(costs, nodes):
    """The calls of both graphs are equal, since a call has only the name of its role."""
    models = (replace(m, shape=replace(m.shape, num_layers=2 * m.shape.num_layers)) for m in GRAPH.models)
    larger = replace(costs, graph=replace(GRAPH, models=tuple(models)))
    alone = replace(larger, sources=CostSources.equal_nodes(HARDWARE, 1))
    for node in nodes:
        if node.kind in ("generate", "inference", "train_step"):
            assert larger.cost(node) == alone.cost(node)
            assert larger.cost(node).total > costs.cost(node).total


def test_costs_that_are_no_longer_kept_are_computed_again(costs, nodes, monkeypatch):
    monkeypatch.setattr(sources, "MOST_KEPT", 1)
    few = replace(costs, sources=CostSources.equal_nodes(HARDWARE, 1))
    assert [few.cost(node) for node in nodes] == [costs.cost(node) for node in nodes]


def test_a_plan_beyond_the_known_nodes_is_refused(plan, nodes):
    with pytest.raises(InvalidInput, match="whose hardware is known"):
        NodeCosts(GRAPH, plan, WORKLOAD, CostSources(())).seconds(nodes[0])
