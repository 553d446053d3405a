"""Checkpoints in the graph: what waits for them, and that a run which goes on from one is the rest of the whole run."""

from collections import defaultdict

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.checkpointing import stateful_calls
from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.augmented.offloading import is_overwritten
from prefect_rlhf.placement.augmented.unroll import latest_run
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.plan import instances, offloaded_parts, trained_instance
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.support.cases import examples
from tests.support.groups_of_steps import in_groups
from tests.support.strategies import GIB, TWO_DEVICES, dependency_graph, graphs, plans, ppo

FOUR_DEVICES = ClusterShape("four", 1, 4, 8 * GIB)
EVERY = st.sampled_from([None, 1, 2, 3])


class DevicesAndDisk:
    """Which version each copy of weights is, on its devices or away, and what is on disk, played node by node."""

    def __init__(self, graph, plan, finished=0):
        self.graph, self.finished = graph, finished
        self.trained = {m.role: i for m in graph.models if (i := trained_instance(graph, plan, m.role)) is not None}
        self.followers = {m.role: m.follows for m in graph.models if m.follows}
        built = {i: finished // f.every * f.every for i in instances(graph, plan) if (f := self.followers.get(i.role))}
        self.version = defaultdict(int, dict.fromkeys(self.trained.values(), finished) | built)
        whole = {instance for instance, part in offloaded_parts(graph, plan).items() if part == "all"}
        optimizers = offloaded_parts(graph, plan).keys() & set(self.trained.values())
        self.comes_and_goes = {(i, "weights") for i in whole} | {(i, "optimizer") for i in optimizers}
        self.away = set(self.comes_and_goes)
        self.on_host = {(i, p): self.version[i] for i, p in self.away if not is_overwritten(graph, plan, i)}
        self.optimizer = {i: self.version[i] for i in self.trained.values()}  # the version that an optimizer belongs to
        self.state_of = defaultdict(list)  # stateful computation -> the steps that left its state, as reported
        self.copies: dict[int, dict[str, int]] = defaultdict(dict)  # step -> the version of each role's copy
        self.most_copies = 0  # at once
        self.evaluated: dict[int, set[str]] = defaultdict(set)  # by step: the calls that ran
        self.committed: list[int] = []

    def run(self, node):
        self._check(node)
        if node.kind == "reallocate":
            assert (node.work.target, "weights") not in self.away
            self.version[node.work.target] = node.reads
        elif node.kind == "follow":
            assert (node.work.target, "weights") not in self.away
            assert self.version[node.work.target] == node.work.held
            self.version[node.work.target] = node.writes
        elif node.kind == "train_step":
            self.version[node.work.instance] = self.optimizer[node.work.instance] = node.writes
        elif node.kind in ("offload", "reload"):
            self._copy(node)
        elif node.kind == "checkpoint":
            assert node.reads == self._version_after(node.work.instance.role, node.step)
            self.copies[node.step][node.work.instance.role] = node.reads
            self.most_copies = max(self.most_copies, len(self.copies))
        elif node.kind == "commit":
            roles = [*self.trained, *self.followers]
            assert self.copies.pop(node.step) == {role: self._version_after(role, node.step) for role in roles}
            for call in stateful_calls(self.graph):
                due = latest_run(call, node.step)
                assert due <= self.finished or due in self.state_of[call.name], "a state is not yet known"
            evaluations = {call.name for call in self.graph if call.every and node.step % call.every == 0}
            assert evaluations <= self.evaluated[node.step], "a resumed run would lack an evaluation"
            self.committed.append(node.step)
        elif node.kind == "compute" and node.call.stateful:
            self.state_of[node.call.name].append(node.step)
        if node.call is not None and node.kind != "transfer":
            self.evaluated[node.step].add(node.call.name)

    def _version_after(self, role, step):
        return step if role in self.trained else step // self.followers[role].every * self.followers[role].every

    def _check(self, node):
        """What a node uses is on the devices, in the version that it reads."""
        for instance in {getattr(node.work, name, None) for name in ("instance", "source")} - {None}:
            held = self.optimizer if getattr(node.work, "part", None) == "optimizer" else self.version
            if node.kind != "reload":
                assert held[instance] == node.reads, f"{node.id} found v{held[instance]}"
            trains = node.kind in ("train_step", "checkpoint") and instance in self.optimizer
            needs = {"weights", "optimizer"} if trains else {"weights"}
            there = node.kind in ("reload", "offload") or self.away.isdisjoint((instance, part) for part in needs)
            assert there, f"{node.id} uses what is in host memory"
            if "optimizer" in needs:
                assert self.optimizer[instance] == node.reads, f"{node.id} found v{self.optimizer[instance]}"

    def _copy(self, node):
        """Offload or reload a part. A reload without copies brings nothing, and an offload leaves the host as it is."""
        instance, part = node.work.instance, "optimizer" if node.work.part == "optimizer" else "weights"
        found = None
        if node.kind == "offload":
            assert (instance, part) not in self.away
            self.away.add((instance, part))
            self.on_host |= {(instance, part): node.reads} if node.work.copies else {}
        else:
            self.away.remove((instance, part))
            found = self.on_host[instance, part] if node.work.copies else None
            assert found in (node.reads, None), f"{node.id} finds v{found} on the host"
        (self.optimizer if part == "optimizer" else self.version)[instance] = found


def calls_of(augmented: AugmentedGraph, finished=-1):
    """What the graph computes after a step: each call's versions, and what it waits for of those that compute."""
    computing = {node.id for node in augmented if node.call is not None and node.kind != "transfer"}
    reachable = nx.transitive_closure_dag(dependency_graph(augmented))
    late = {id for id in computing if augmented.node(id).step > finished}
    return {
        id: (augmented.node(id).reads, augmented.node(id).writes, {a for a in reachable.predecessors(id) if a in late})
        for id in late
    }


def bare(node: Node):
    """A node without what it waits for."""
    return node.id, node.step, node.meshes, node.work


@settings(max_examples=examples(40))
@given(st.data(), graphs(), st.integers(1, 5), EVERY, st.randoms())
def test_a_checkpoint_is_consistent_in_any_order(data, graph, num_steps, every, chance):
    """All roles' weights and all states after the same step, in every order that the dependencies allow."""
    plan = data.draw(plans(graph, FOUR_DEVICES))
    first = data.draw(st.integers(0, num_steps - 1))
    augmented = augment(graph, plan, num_steps, first, every)
    keys = {node.id: chance.random() for node in augmented}
    any_order = nx.lexicographical_topological_sort(dependency_graph(augmented), key=keys.__getitem__)
    for order in (augmented.nodes, [augmented.node(id) for id in any_order]):
        devices = DevicesAndDisk(graph, plan, first)
        for node in order:
            devices.run(node)
        assert devices.away == devices.comes_and_goes
        due = [s for s in range(first + 1, num_steps + 1) if every and (s % every == 0 or s == num_steps)]
        assert devices.committed == due
        assert devices.most_copies <= 1, "a second copy is taken before the first is on disk"


@settings(max_examples=examples(40))
@given(st.data(), graphs(), st.integers(2, 6), st.integers(1, 3))
def test_a_resumed_graph_computes_the_rest_of_the_run(data, graph, num_steps, every):
    """The same calls with the same versions, and among them the same order, under staleness and offloading too."""
    plan = data.draw(plans(graph, FOUR_DEVICES))
    whole = augment(graph, plan, num_steps, 0, every)
    commits = [node.step for node in whole if node.kind == "commit" and node.step < num_steps]
    for first in commits:
        rest = augment(graph, plan, num_steps, first, every)
        found, expected = calls_of(rest), calls_of(whole, first)
        assert {id: of[:2] for id, of in found.items()} == {id: of[:2] for id, of in expected.items()}
        assert all(found[id][2] <= expected[id][2] for id in found), "it waits for no more than in the whole run"


@settings(max_examples=examples(30))
@given(st.data(), graphs(), st.integers(2, 6), st.integers(1, 3))
def test_without_offloading_it_is_the_rest_node_by_node(data, graph, num_steps, every):
    """Every node of the later steps with those of its dependencies that are left."""
    plan = data.draw(plans(graph, FOUR_DEVICES, offload=False))
    whole = augment(graph, plan, num_steps, 0, every)
    for first in [node.step for node in whole if node.kind == "commit" and node.step < num_steps]:
        rest = augment(graph, plan, num_steps, first, every)
        tail = [node for node in whole if node.step > first]
        assert [bare(node) for node in rest] == [bare(node) for node in tail]
        ids = {node.id for node in tail}
        for left, full in zip(rest, tail, strict=True):
            assert set(left.dependencies) == {d for d in full.dependencies if d.node in ids}


def flattened(num_steps=4, every=2, **options):
    graph = ppo(**options)
    return augment(graph, preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole), num_steps, 0, every)


def waits_of(node: Node) -> set[tuple[str, str]]:
    return {(dependency.node, dependency.kind) for dependency in node.dependencies}


def test_a_checkpoint_is_ordered_between_train_steps():
    augmented = flattened()
    assert waits_of(augmented.node("checkpoint.actor@2")) == {("actor_train_step@2", "version")}
    assert ("checkpoint.actor@2", "overwrite") in waits_of(augmented.node("actor_train_step@3"))
    assert ("checkpoint.actor@2", "overwrite") not in waits_of(augmented.node("critic_train_step@3"))


def test_the_next_step_waits_for_the_copy_alone():
    """What writes it down runs behind: of the graph only the next copy and its commit wait for a commit."""
    augmented = flattened(num_steps=6)
    reachable = nx.transitive_closure_dag(dependency_graph(augmented))
    waiting = {id for id in reachable.successors("commit@2") if augmented.node(id).step <= 4}
    assert waiting == {"checkpoint.actor@4", "checkpoint.critic@4", "commit@4"}
    assert ("commit@2", "memory") in waits_of(augmented.node("checkpoint.actor@4"))
    assert ("advantages@2", "state") in waits_of(augmented.node("commit@2"))
    assert not {"commit@2", "commit@4"} & {name for name, _ in waits_of(augmented.node("advantages@3"))}


def test_a_copy_has_compute_and_the_way_to_disk_and_a_commit_the_way_to_disk_alone():
    """So even where a dependency is not there to see, as in a group of steps, no copy begins while one is written."""
    augmented = flattened()
    assert {what for _, what in augmented.node("checkpoint.actor@2").occupies} == {"compute", "disk"}
    assert {what for _, what in augmented.node("commit@2").occupies} == {"disk"}


def test_copies_of_roles_on_disjoint_devices_run_at_the_same_time():
    """On the same devices they share each device's link to its host, so there the second waits for the first."""
    graph = ppo()
    apart = augment(graph, preset("split", graph, TWO_DEVICES, TWO_DEVICES.whole), 2, checkpoint_every=2)
    actor, critic = apart.node("checkpoint.actor@2"), apart.node("checkpoint.critic@2")
    assert actor.occupies.isdisjoint(critic.occupies)
    assert not nx.has_path(dependency_graph(apart), actor.id, critic.id)
    assert not nx.has_path(dependency_graph(apart), critic.id, actor.id)
    assert flattened().node("checkpoint.actor@2").occupies == flattened().node("checkpoint.critic@2").occupies


def test_a_commit_waits_for_every_trained_role():
    versions = {("checkpoint.actor@2", "version"), ("checkpoint.critic@2", "version")}
    assert versions <= waits_of(flattened().node("commit@2"))


def test_titles_name_the_written_files():
    augmented = flattened()
    assert augmented.node("checkpoint.actor@4").title == "actor.checkpoint · step 4 · n0:0-1 dp2 · v4"
    assert augmented.node("commit@4").title == "checkpoint.commit · step 4 · n0:0-1"
    assert augmented.node("checkpoint.actor@4").reason == (
        "a run that ends after step 4 goes on from actor v4 and its optimizer."
    )


@pytest.mark.parametrize(("every", "expected"), [(None, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (9, [5])])
def test_checkpoints_come_at_intervals_and_after_the_last_step(every, expected):
    assert [node.step for node in flattened(5, every) if node.kind == "commit"] == expected


def test_staleness_drains_at_a_checkpoint():
    """Right after one, generation reads the newest weights: older ones are not on disk."""
    reads = [flattened(6, 3, staleness=1).node(f"actor_generate@{step}").reads for step in range(1, 7)]
    assert reads == [0, 0, 1, 3, 3, 4]


def test_a_run_that_goes_on_brings_the_saved_weights_to_the_generation_engine_first():
    graph = ppo()
    rest = augment(graph, preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole), 4, 2)
    assert ("reallocate.actor.vllm@3", "version") in waits_of(rest.node("actor_generate@3"))
    assert rest.node("reallocate.actor.vllm@3").dependencies == ()
    assert [group[0].step for group in in_groups(rest, 1)] == [3, 4]
