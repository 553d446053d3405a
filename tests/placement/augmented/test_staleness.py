"""With staleness, generation runs ahead of training, and still no call sees another version than its edge names."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.graph_builder import GraphBuilder
from prefect_rlhf.placement.augmented.node import Dependency, Node
from prefect_rlhf.placement.augmented.resources import Resource
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.schedule.schedule import schedule
from tests.support.cases import examples
from tests.support.strategies import GIB, TWO_DEVICES, dependency_graph, placed, plans, ppo, remax

pytestmark = pytest.mark.quick

FOUR_DEVICES = ClusterShape("four", 1, 4, 8 * GIB)


class Weights:
    """What every instance holds while nodes run at the same time: a version, who reads it, whether it is written."""

    def __init__(self) -> None:
        self.version: dict[ModelInstance, int] = defaultdict(int)
        self.readers: dict[ModelInstance, set[str]] = defaultdict(set)

    def begin(self, node: Node) -> None:
        for instance in reads_from(node):
            assert self.version[instance] == node.reads, f"{node.id} begins on v{self.version[instance]}"
            self.readers[instance].add(node.id)
        for instance in writes_to(node):
            assert self.readers[instance] <= {node.id}, f"{node.id} writes under {self.readers[instance]}"
            self.version[instance] = -1  # half written

    def end(self, node: Node) -> None:
        for instance in reads_from(node):
            self.readers[instance].discard(node.id)
            changed = instance not in writes_to(node) and self.version[instance] != node.reads
            assert not changed, f"{node.id} ends on v{self.version[instance]}"
        for instance in writes_to(node):
            self.version[instance] = node.reads if node.writes is None else node.writes


def reads_from(node: Node) -> list[ModelInstance]:
    if node.kind in ("offload", "reload"):
        return []
    return [getattr(node.work, name) for name in ("instance", "source") if hasattr(node.work, name)]


def writes_to(node: Node) -> list[ModelInstance]:
    of_kind = {"train_step": "instance", "reallocate": "target"}
    return [getattr(node.work, of_kind[node.kind])] if node.kind in of_kind else []


def play(augmented: AugmentedGraph, chance: random.Random) -> set[frozenset[str]]:
    """Run with nodes that take any time, in any order that dependencies and devices allow; pairs that ran together."""
    weights, together = Weights(), set[frozenset[str]]()
    waiting = {node.id: set(node.depends_on) for node in augmented}
    running: dict[str, frozenset[tuple[Device, Resource]]] = {}
    while waiting or running:
        busy = frozenset().union(*running.values())
        able = [id for id, left in waiting.items() if not left and busy.isdisjoint(augmented.node(id).occupies)]
        if able and (not running or chance.random() < 0.6):
            id = chance.choice(able)
            del waiting[id]
            together |= {frozenset((id, other)) for other in running}
            running[id] = augmented.node(id).occupies
            weights.begin(augmented.node(id))
            continue
        assert running, f"nothing can run: {sorted(waiting)[:3]} wait"
        id = chance.choice(sorted(running))
        del running[id]
        weights.end(augmented.node(id))
        for left in waiting.values():
            left.discard(id)
    return together


@settings(max_examples=examples(60))
@given(
    st.data(),
    st.builds(ppo, staleness=st.integers(0, 2), evaluate_every=st.sampled_from([None, 1, 2])),
    st.integers(1, 5),
    st.randoms(),
)
def test_no_reader_sees_another_version_whatever_overlaps(data, graph, num_steps, chance):
    augmented = augment(graph, data.draw(plans(graph, FOUR_DEVICES)), num_steps)
    for _ in range(3):
        play(augmented, chance)


def shared(graph: DataflowGraph, num_steps: int = 4) -> AugmentedGraph:
    """Generation from the very weights that are trained."""
    plan = placed(preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole), "actor_generate", engine="megatron")
    return augment(graph, plan, num_steps)


@pytest.mark.parametrize("seed", range(5))
def test_a_train_step_waits_for_stale_generation_from_its_own_weights(seed):
    """The hazard: without a copy, step 2's generate reads v1 in the storage that step 1's train_step makes v2."""
    augmented = shared(ppo(staleness=1))
    assert ("actor_generate@3", "overwrite") in {
        (d.node, d.kind) for d in augmented.node("actor_train_step@2").dependencies
    }
    play(augmented, random.Random(seed))


@pytest.mark.parametrize("seed", range(5))
def test_the_simulation_finds_a_hazard_that_is_planted(seed):
    """The same graph without the waits for readers: some order of events shows a reader another version."""
    augmented = shared(ppo(staleness=1))
    careless = tuple(
        replace(node, dependencies=tuple(d for d in node.dependencies if d.kind != "overwrite")) for node in augmented
    )
    order = sorted(careless, key=lambda node: (node.step, [n.id for n in augmented].index(node.id)))
    with pytest.raises(AssertionError, match="begins on v|writes under|ends on v"):
        for attempt in range(200):
            play(replace(augmented, nodes=tuple(topological(order))), random.Random(1000 * seed + attempt))


def topological(nodes: list[Node]) -> list[Node]:
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(node.id for node in nodes)
    graph.add_edges_from((d, node.id) for node in nodes for d in node.depends_on)
    by_id = {node.id: node for node in nodes}
    return [by_id[id] for id in nx.topological_sort(graph)]


def separation(graph: DataflowGraph, cluster: ClusterShape, num_steps: int = 5) -> AugmentedGraph:
    return augment(graph, preset("separation", graph, cluster, cluster.whole), num_steps)


@pytest.mark.parametrize("cluster", [TWO_DEVICES, FOUR_DEVICES], ids=lambda cluster: cluster.name)
def test_separation_generates_the_next_step_while_it_trains(cluster):
    """With a copy of the weights: some run has them at the same time, and the estimated one has in each step."""
    augmented = separation(ppo(staleness=1), cluster)
    pairs = set().union(*(play(augmented, random.Random(seed)) for seed in range(20)))
    assert frozenset(("actor_generate@3", "actor_train_step@2")) in pairs
    seconds = {"generate": 10.0, "train_step": 4.0}
    slots = {s.node.id: s for s in schedule(augmented, lambda node: seconds.get(node.kind, 0.5)).slots}
    for step in range(1, 4):
        generate, train = slots[f"actor_generate@{step + 1}"], slots[f"actor_train_step@{step}"]
        assert generate.start < train.start < train.end < generate.end
        assert generate.node.reads == step - 1


def test_on_policy_separation_takes_turns():
    augmented = separation(ppo(), TWO_DEVICES)
    assert "actor_train_step@2" in nx.ancestors(dependency_graph(augmented), "actor_generate@3")


@pytest.mark.parametrize("graph", [ppo(staleness=1), replace(remax(), staleness=1)], ids=["ppo", "remax"])
def test_no_later_row_is_fetched_from_devices_that_generate_the_next_step(graph):
    """Rows leave the generating half as soon as they are there: else training would wait for the next generate."""
    augmented = separation(graph, FOUR_DEVICES)
    generating = {device for node in augmented if node.kind == "generate" for device in node.devices}
    for node in augmented.of_step(2):
        if node.kind == "transfer" and generating & node.devices:
            assert all(augmented.node(id).devices <= generating for id in node.depends_on)


def test_calls_that_would_wait_for_each_other_are_named_with_what_to_do():
    """No traced graph gets there, since versions only grow; a kind of node that breaks this must hear of it."""
    builder = GraphBuilder()
    for node in shared(ppo(staleness=1), 2):
        builder.add(node, (node.step,))
    builder.wait("actor_generate@2", Dependency("actor_train_step@1", "version", "actor v1"))
    with pytest.raises(GraphError, match="its own mesh or strategy, or lower staleness") as error:
        builder.ordered()
    assert "actor_generate@2" in str(error.value) and "actor_train_step@1" in str(error.value)
    assert "ref_inference" not in str(error.value), "only those that wait for each other are named"
    assert "\n" not in str(error.value)
