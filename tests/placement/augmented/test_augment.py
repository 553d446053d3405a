"""The augmented graph: run in any order that its dependencies allow, every call finds what it needs."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
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
from prefect_rlhf.placement.augmented.row_uses import row_uses, use_counts
from prefect_rlhf.placement.augmented.work import ModelCall
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device, DeviceMesh
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.rows.moves import row_transfers
from prefect_rlhf.placement.rows.shares import placed_call, rows_held
from prefect_rlhf.placement.schedule.schedule import schedule
from tests.support.cases import examples
from tests.support.groups_of_steps import in_groups
from tests.support.strategies import (
    GIB,
    ROLLOUT,
    TWO_DEVICES,
    call,
    critic_first,
    dependency_graph,
    dpo,
    graphs,
    placed,
    plans,
    ppo,
    remax,
)

pytestmark = pytest.mark.quick

FOUR_DEVICES = ClusterShape("four", 1, 4, 8 * GIB)
TWO_NODES = ClusterShape("two_nodes", 2, 2, 8 * GIB)
WHOLE = TWO_DEVICES.whole


class Devices:
    """Storage of all devices, played through node by node; knows placements but no dependency and no layout rule."""

    def __init__(self, graph: DataflowGraph, plan: ExecutionPlan, seed: int = 0) -> None:
        self.graph, self.plan = graph, plan
        draw = random.Random(seed)
        generates = [call for call in graph if call.kind == "generate"]
        self.lengths = {call.name: tuple(draw.randint(1, 40) for _ in range(call.num_rows)) for call in generates}
        self.told: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)  # of rows that were generated
        self.uses_left: dict[int, Counter] = {}
        self.version: dict[ModelInstance, int] = defaultdict(int)
        self.away = {
            ModelInstance(c.role, p.engine, p.mesh, p.strategy, p.device_order)
            for c in graph
            if (p := plan[c.name]).offload == "all" and c.role
        }
        self.comes_and_goes = frozenset(self.away)
        self.optimizers_away = {
            ModelInstance(c.role, p.engine, p.mesh, p.strategy, p.device_order)
            for c in graph
            if (p := plan[c.name]).offload != "none" and c.kind == "train_step"
        }
        self.optimizers_come_and_go = frozenset(self.optimizers_away)
        self.late = {
            ModelInstance(c.role, p.engine, p.mesh, p.strategy, p.device_order)
            for c in graph
            if not (p := plan[c.name]).prefetch
        }
        self.rows: dict[tuple[Device, int, str, str], set[int]] = defaultdict(set)

    def run(self, node: Node) -> None:
        moves = {
            "transfer": self._transfer,
            "reallocate": self._reallocate,
            "follow": self._follow,
            "offload": self._offload,
            "reload": self._reload,
            "export": self._export,
        }
        moves.get(node.kind, self._call)(node)
        self._check_late(node)

    def _check_late(self, node: Node) -> None:
        """What comes back late is on no device on which something else computes."""
        if "compute" not in node.resources or node.kind in ("reload", "offload"):
            return  # a copy that stops its devices computes nothing: a reallocate needs two of them there
        weights, optimizers = self.comes_and_goes - self.away, self.optimizers_come_and_go - self.optimizers_away
        names = "instance", "source", "target"
        used = {getattr(node.work, name, None) for name in names}
        trained = used if node.kind in ("train_step", "checkpoint") else set()
        for visitor in self.late & ((weights - used) | (optimizers - trained)):
            assert node.devices.isdisjoint(visitor.devices), f"{visitor.name} is there during {node.id}"

    def run_all(self, augmented: AugmentedGraph, order: Iterable[Node]) -> None:
        """Every node in this order, rows freed after their last use."""
        steps = range(augmented.last_step + 1)
        uses = {step: [row_uses(self.graph, self.plan, node) for node in augmented.of_step(step)] for step in steps}
        self.uses_left = {step: use_counts(found) for step, found in uses.items()}
        for node in order:
            self.run(node)
            self._free(node)

    def _free(self, node: Node) -> None:
        """As ranks do: drop what no other node of the step uses on the device."""
        left = self.uses_left[node.step]
        for device, keys in row_uses(self.graph, self.plan, node).items():
            for producer, key in keys:
                left[device, (producer, key)] -= 1
                if not left[device, (producer, key)]:
                    self.rows.pop((device, node.step, producer, key), None)

    def _call(self, node: Node) -> None:
        if isinstance(node.work, ModelCall):
            instance, trains = node.work.instance, node.kind == "train_step"
            assert instance not in self.away, f"{node.id} uses an instance in host memory"
            assert self.version[instance] == node.reads, f"{node.id} found v{self.version[instance]}"
            assert not (trains and instance in self.optimizers_away), f"{node.id} has no optimizer"
        told, name, done = self.told[node.step], node.call.name, set()
        for device, need in placed_call(self.graph, self.plan, name).needs().items():
            rows = set(need.share.rows(told, node.part))
            done |= rows
            for port in node.call.inputs:
                if port.source in {c.name for c in self.graph}:
                    for key in need.keys & set(port.keys):
                        wanted = {row // port.rows_each for row in rows}
                        assert wanted <= self.rows[device, node.step, port.source, key], (node.id, device, key)
        if node.kind == "generate":
            before = told.get(name, (0,) * node.call.num_rows)
            told[name] = tuple(self.lengths[name][row] if row in done else n for row, n in enumerate(before))
        if node.kind == "train_step":
            self.version[node.work.instance] = node.writes
        for device, share in rows_held(self.graph, self.plan, node.call.name).items():
            for key in node.call.outputs:
                self.rows[device, node.step, name, key] |= set(share.rows(told, node.part))

    def _transfer(self, node: Node) -> None:
        told = self.told[node.step]
        for move in row_transfers(self.graph, self.plan, node.call.name, node.work.moves, told, node.part):
            assert {move.source, move.target} <= set(node.devices)
            for key in move.keys:
                held = self.rows[move.source, node.step, move.producer, key]
                assert set(move.rows) <= held, f"{node.id} sends rows that {move.source} does not hold"
                self.rows[move.target, node.step, move.producer, key] |= set(move.rows)

    def _reallocate(self, node: Node) -> None:
        source, target = node.work.source, node.work.target
        assert not {source, target} & self.away
        assert self.version[source] == node.reads > self.version[target]
        assert {*source.mesh.devices(), *target.mesh.devices()} == set(node.devices)
        self.version[target] = node.reads

    def _follow(self, node: Node) -> None:
        source, target = node.work.source, node.work.target
        assert not {source, target} & self.away
        assert (self.version[source], self.version[target]) == (node.reads, node.work.held)
        assert {*source.mesh.devices(), *target.mesh.devices()} == set(node.devices)
        self.version[target] = node.writes

    def _export(self, node: Node) -> None:
        assert node.work.instance not in self.away
        assert self.version[node.work.instance] == node.reads == node.step, "what is written is the last version"

    def _offload(self, node: Node) -> None:
        instance, part = node.work.instance, node.work.part
        away = self._away(instance, part)
        assert instance not in away
        assert self.version[instance] == node.reads
        away.add(instance)

    def _away(self, instance: ModelInstance, part: str) -> set[ModelInstance]:
        """What is away, of the kind of a part. The whole of a trained instance goes in two parts."""
        assert part != ("weights" if instance not in self.optimizers_come_and_go else "all")
        return self.optimizers_away if part == "optimizer" else self.away

    def _reload(self, node: Node) -> None:
        returning, part = node.work.instance, node.work.part
        self._away(returning, part).remove(returning)
        if not node.work.copies:
            self.version[returning] = -1  # no weights, older than v0
        assert self.version[returning] == (node.reads if node.work.copies else -1)
        visitors = (self.comes_and_goes - self.away) | (self.optimizers_come_and_go - self.optimizers_away)
        beside = [instance for instance in visitors if instance.mesh.overlaps(returning.mesh)]
        others = {instance.role for instance in beside} - {returning.role}
        assert all(self._follow_together(role, returning.role) for role in others), "two offloaded roles on one device"

    def _follow_together(self, one: str, other: str) -> bool:
        """A follow needs the leader and the follower at once."""
        leaders = {model.role: model.follows.leader for model in self.graph.models if model.follows}
        return other == leaders.get(one) or one == leaders.get(other)


def shuffled(augmented: AugmentedGraph, chance: random.Random) -> Iterable[Node]:
    """The nodes in any order that their dependencies allow."""
    order = {node.id: chance.random() for node in augmented}
    ids = nx.lexicographical_topological_sort(dependency_graph(augmented), key=order.__getitem__)
    return [augmented.node(id) for id in ids]


def test_calls_on_the_same_devices_have_no_moves():
    """One device, one engine kind, nothing to bring: the calls alone, and at the end the trained model."""
    cluster = ClusterShape("one", 1, 1, 8 * GIB)
    augmented = augment(dpo(), preset("flattening", dpo(), cluster, cluster.whole), 2)
    assert [node.id for node in augmented] == [
        "ref_inference@1",
        "actor_train_step@1",
        "ref_inference@2",
        "actor_train_step@2",
        "export.actor@2",
    ]


@settings(max_examples=examples(150))
@given(st.data(), graphs(), st.sampled_from([FOUR_DEVICES, TWO_NODES]), st.integers(1, 4), st.randoms())
def test_every_node_finds_its_inputs_in_any_order(data, graph, cluster, num_steps, chance):
    """Versions, rows and residence are right under every legal plan, every order of the dependencies, any lengths.

    Rows are freed after their last use on each device, so at the end nothing is left anywhere.
    """
    plan = data.draw(plans(graph, cluster))
    augmented = augment(graph, plan, num_steps)
    for order in (augmented.nodes, shuffled(augmented, chance)):
        devices = Devices(graph, plan, chance.randrange(1000))
        devices.run_all(augmented, order)
        assert not any(devices.rows.values()), "rows that nobody freed"
        assert devices.away == devices.comes_and_goes
        assert devices.optimizers_away == devices.optimizers_come_and_go


@settings(max_examples=examples(40))
@given(st.data(), graphs(), st.integers(1, 4), st.integers(1, 3))
def test_groups_of_steps_hold_all_nodes_in_an_order_that_works(data, graph, num_steps, per_group):
    augmented = augment(graph, data.draw(plans(graph, FOUR_DEVICES)), num_steps)
    groups = in_groups(augmented, per_group)
    done: set[str] = set()
    for node in (node for group in groups for node in group):
        assert set(node.depends_on) <= done
        done.add(node.id)
    assert len(done) == len(augmented)


def flattened(graph: DataflowGraph, num_steps: int = 3, **offloaded: str) -> AugmentedGraph:
    plan = preset("flattening", graph, TWO_DEVICES, WHOLE)
    for name, value in offloaded.items():
        plan = placed(plan, name, offload=value)
    return augment(graph, plan, num_steps)


def test_titles_say_call_step_mesh_strategy_and_version():
    augmented = flattened(ppo(), 5, ref_inference="all")
    titles = {id: augmented.node(id).title for id in dependency_graph(augmented)}
    assert titles["actor_generate@4"] == "actor.generate · step 4 · n0:0-1 dp2 · v3"
    assert titles["actor_train_step@4"] == "actor.train_step · step 4 · n0:0-1 dp2 · v3 → v4"
    assert titles["ref_inference@4"] == "ref.inference · step 4 · n0:0-1 dp2 · v0"
    assert titles["advantages@4"] == "advantages · step 4 · n0:0"
    assert titles["transfer.advantages@4"] == "transfer → advantages · step 4 · n0:0-1"
    assert titles["reload.ref.megatron@4"] == "ref.megatron.reload · step 4 · n0:0-1 dp2 · v0"
    assert titles["reallocate.actor.vllm@5"] == "actor.reallocate · step 5 · megatron n0:0-1 dp2 → vllm n0:0-1 dp2 · v4"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("actor_generate", "actor.generate"),
        ("actor_generate_baseline", "actor.generate_baseline"),
        ("greedy", "actor.generate (greedy)"),
    ],
)
def test_a_title_has_the_calls_own_name_only_where_it_says_more(name, title):
    graph = remax()
    calls = tuple(replace(each, name=name) if each.name == "actor_generate_baseline" else each for each in graph)
    ports = {"actor_generate_baseline": name}
    calls = tuple(
        replace(c, inputs=tuple(replace(p, source=ports.get(p.source, p.source)) for p in c.inputs)) for c in calls
    )
    if name == "actor_generate":
        calls, name = graph.calls, "actor_generate"
    augmented = flattened(replace(graph, calls=calls), 1)
    assert augmented.node(f"{name}@1").title.startswith(f"{title} · step 1")


def test_a_train_step_waits_for_reallocates_that_read_its_weights():
    node = flattened(ppo()).node("actor_train_step@2")
    assert ("reallocate.actor.vllm@2", "overwrite") in {(d.node, d.kind) for d in node.dependencies}


def test_a_reallocate_waits_for_all_readers_of_the_version_it_replaces():
    node = flattened(remax()).node("reallocate.actor.vllm@2")
    assert {d.node for d in node.dependencies if d.kind == "overwrite"} == {
        "actor_generate@1",
        "actor_generate_baseline@1",
    }


def test_version_zero_comes_from_the_checkpoint():
    assert not [node for node in flattened(ppo()).of_step(1) if node.kind == "reallocate"]


def test_calls_that_need_the_same_rows_share_a_transfer():
    """What generate made is dealt by tokens once, for every call on as many replicas; the rest moves by itself."""
    augmented = flattened(ppo(mini_batches=2), 1)
    transfers = [(node.id, node.work.moves) for node in augmented if node.kind == "transfer"]
    moved = {id: {move.producer: move.keys for move in moves} for id, moves in transfers}
    assert moved == {
        "transfer.ref_inference@1": {"actor_generate": ("tokens", "prompt_length")},
        "transfer.advantages@1": {
            "actor_generate": ("tokens", "prompt_length", "logprobs", "truncated"),
            "ref_inference": ("logprobs",),
            "reward_inference": ("scores",),
            "critic_inference": ("values",),
        },
        "transfer.actor_train_step@1": {
            "actor_generate": ("logprobs", "truncated"),
            "advantages": ("advantages",),
        },
        "transfer.critic_train_step@1": {"advantages": ("returns",)},
    }
    for name in ("reward_inference@1", "critic_inference@1", "actor_train_step@1", "critic_train_step@1"):
        assert "transfer.ref_inference@1" in augmented.node(name).depends_on


def test_offloaded_roles_are_on_the_devices_only_around_their_uses():
    augmented = flattened(ppo(), 2, ref_inference="all", reward_inference="all")
    moves = [node.id for node in augmented if node.kind in ("reload", "offload")]
    assert moves[:4] == [
        "reload.ref.megatron@1",
        "offload.ref.megatron@1",
        "reload.reward.megatron@1",
        "offload.reward.megatron@1",
    ]
    assert "offload.ref.megatron@1" in augmented.node("reload.reward.megatron@1").depends_on


def test_rows_are_brought_to_disjoint_calls_before_either_of_them_runs():
    """Else the second transfer would wait behind the first call, and the two calls would never overlap."""
    augmented = augment(ppo(), preset("side_by_side", ppo(), TWO_DEVICES, WHOLE), 2)
    place = {node.id: index for index, node in enumerate(augmented)}
    moves = ("transfer.ref_inference@2", "transfer.reward_inference@2", "reallocate.actor.vllm@2")
    calls = ("ref_inference@2", "reward_inference@2", "critic_inference@2")
    assert max(place[name] for name in moves) < min(place[name] for name in calls)
    ancestors = nx.ancestors(dependency_graph(augmented), "ref_inference@2")
    assert "reward_inference@2" not in ancestors
    assert place["critic_inference@2"] < place["transfer.advantages@2"]


def beside_generation(graph: DataflowGraph, train: str = "n0:0") -> ExecutionPlan:
    """The actor trains on both devices and generates on the second, the critic trains elsewhere."""
    plan = placed(preset("flattening", graph, TWO_DEVICES, WHOLE), "actor_generate", mesh="n0:1", tp=1, dp=1)
    return placed(plan, "critic_train_step", mesh=train, dp=1, tp=1)


def test_a_critic_trains_while_the_next_step_generates_on_other_devices():
    """The actor's weights leave first; after the last step there are none to wait for."""
    augmented = augment(ppo(), beside_generation(ppo()), 3)
    waits = {step: set(augmented.node(f"critic_train_step@{step}").depends_on) for step in (1, 2, 3)}
    moves = {step: f"reallocate.actor.vllm@{step + 1}" for step in (1, 2)}
    assert all(moves[step] in waits[step] for step in (1, 2))
    assert not any(name.startswith("reallocate.actor") for name in waits[3])
    spans = {
        slot.node.id: slot for slot in schedule(augmented, lambda node: 1.0 if node.kind != "transfer" else 0.0).slots
    }
    assert spans["critic_train_step@1"].start == spans["actor_generate@2"].start == spans[moves[1]].end
    assert spans[moves[1]].start == spans["actor_train_step@1"].end


def test_no_critic_waits_for_weights_that_would_not_pass_it():
    """If it trains where the next step generates, or with older weights, the earlier step goes first."""
    for graph, train in ((ppo(), "n0:1"), (ppo(staleness=1), "n0:0")):
        augmented = augment(graph, beside_generation(graph, train), 3)
        assert "order" not in {d.kind for d in augmented.node("critic_train_step@1").dependencies}


def test_no_critic_waits_if_a_call_of_its_step_reads_the_trained_critic():
    """The actor's train_step follows that call, and its weights arrive after it."""
    augmented = augment(critic_first(), beside_generation(critic_first()), 3)
    assert "fresh_values@2" in nx.ancestors(dependency_graph(augmented), "actor_train_step@2")
    assert not any(d.kind == "order" for node in augmented for d in node.dependencies)


def test_no_critic_waits_for_weights_that_come_directly_before_a_later_call():
    """Of two copies of the actor, an inference behind the generation reads the second, which is offloaded or stays."""
    of_actor = call("actor_inference", "inference", "actor", {"actor_generate": ROLLOUT[:2]}, ("logprobs",))
    graph = replace(ppo(), calls=(*ppo().calls[:1], of_actor, *ppo().calls[1:]))
    plan = placed(
        preset("flattening", graph, FOUR_DEVICES, FOUR_DEVICES.whole), "actor_generate", mesh="n0:2", tp=1, dp=1
    )
    plan = placed(plan, "critic_train_step", mesh="n0:0-1", dp=2, tp=1)
    for offload, also in (("all", set()), ("none", {"reallocate.actor.megatron.n0:3.dp1@2"})):
        later = placed(plan, "actor_inference", mesh="n0:3", dp=1, tp=1, offload=offload)
        critic = augment(graph, later, 3).node("critic_train_step@1")
        awaited = {d.node for d in critic.dependencies if d.kind == "order"}
        assert awaited == {"reallocate.actor.vllm@2"} | also


def test_evaluation_comes_last_in_its_step():
    kinds = [node.call.every for node in flattened(ppo(evaluate_every=1), 2).of_step(2) if node.kind == "inference"]
    assert kinds == [None, None, None, 1]


def test_two_versions_in_the_same_step_have_two_ids():
    """Generation of step 2 reads v1, and the evaluation after it reads v2, in one instance."""
    ids = {node.id for node in flattened(ppo(evaluate_every=2), 3)}
    assert {"reallocate.actor.vllm@2", "reallocate.actor.vllm.v2@2"} <= ids


def test_with_staleness_the_next_generation_does_not_wait_for_training():
    """Generation on its own device of step 4 may run while step 3 trains."""
    graph = remax()
    graph = replace(graph, staleness=1)
    plan = preset("flattening", graph, TWO_DEVICES, WHOLE)
    for name in ("actor_generate", "actor_generate_baseline", "reward_inference", "score_baseline", "advantages"):
        plan = placed(plan, name, mesh="n0:0", dp=1)
    plan = placed(plan, "actor_train_step", mesh="n0:1", dp=1)
    before = nx.ancestors(dependency_graph(augment(graph, plan, 4)), "actor_generate@4")
    assert "actor_train_step@2" in before
    assert "actor_train_step@3" not in before


def test_every_inserted_node_says_why():
    for node in flattened(ppo(), 2, ref_inference="all"):
        assert node.reason.endswith(".")
        assert "\n" not in node.reason


def test_nodes_that_wait_for_each_other_are_refused():
    """No graph that traces gets there; whoever adds a kind of move must hear of it."""
    builder = GraphBuilder()
    for node in flattened(ppo(), 1):
        builder.add(node, (0, 0, 0))
    builder.wait("actor_generate@1", Dependency("actor_train_step@1", "overwrite"))
    with pytest.raises(GraphError, match="actor_generate@1.* wait for each other"):
        builder.ordered()


def test_nodes_out_of_order_are_refused():
    augmented = flattened(ppo(), 1)
    with pytest.raises(GraphError, match="does not come before it"):
        replace(augmented, nodes=augmented.nodes[::-1])


def test_a_mesh_is_named_once_when_another_holds_it():
    node = flattened(ppo(), 1).node("transfer.advantages@1")
    assert node.meshes == (DeviceMesh(0, 1, 0, 2),)
