"""Groups of steps made one at a time: node for node the groups of the whole graph, whatever the length of the run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.augmented import step_groups
from prefect_rlhf.placement.augmented.augment import augment, unrolled_nodes
from prefect_rlhf.placement.augmented.checkpointing import StepRange
from prefect_rlhf.placement.augmented.node import BEHIND, Node
from prefect_rlhf.placement.augmented.step_groups import PlanEnd, StepGroups
from prefect_rlhf.placement.augmented.work import Offload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.presets import PRESETS
from tests.placement.augmented.test_checkpointing import DevicesAndDisk
from tests.support.cases import examples
from tests.support.groups_of_steps import in_groups
from tests.support.strategies import GIB, HELD_OUT, ROLLOUT, call, dpo, following, generated, placed, plans, ppo, remax

FOUR_DEVICES = ClusterShape("four", 1, 4, 8 * GIB)
FOUR_NODES = ClusterShape("four_nodes", 4, 2, 8 * GIB)
Groups = list[tuple[Node, ...]]


def evaluated_twice(staleness: int, every: int, other: int) -> DataflowGraph:
    """PPO that evaluates its actor every few steps, and counts with a state of its own, and its critic at others."""
    graph = ppo(staleness, every)
    held_out = {"rows": generated("evaluate_generate", HELD_OUT), "num_rows": 4}
    again = {"rows": generated("evaluate_again", HELD_OUT), "num_rows": 4}
    seen = {"evaluate_generate": ROLLOUT[:2], "evaluate_scores": ("scores",)}
    more = (
        call("count", "compute", None, seen, stateful=True, every=every, **held_out),
        call("evaluate_again", "generate", "actor", {"held_out": ("prompt_tokens",)}, ROLLOUT, every=other, **again),
        call("judge", "inference", "critic", {"evaluate_again": ROLLOUT[:2]}, ("values",), every=other, **again),
    )
    return replace(graph, calls=(*graph.calls, *more))


def long_graphs() -> st.SearchStrategy[DataflowGraph]:
    """Graphs whose evaluation is apart by up to five steps."""
    stale, every = st.integers(0, 2), st.integers(1, 5)
    return st.one_of(
        st.builds(ppo, stale, st.one_of(st.none(), every)),
        st.builds(evaluated_twice, stale, every, every),
        st.builds(remax),
        st.builds(dpo),
        st.builds(following, st.one_of(st.builds(ppo, stale, st.one_of(st.none(), every)), st.builds(dpo)), every),
    )


def handed_out(groups: StepGroups) -> Groups:
    return list(iter(groups.next_group, ()))


def as_handed_out(groups: Groups) -> Iterator[tuple[Node, ...]]:
    """Groups of the whole graph, without the waits for what ended before the group before began, commits apart."""
    before: tuple[Node, ...] = ()
    behind = {node.id for group in groups for node in group if node.kind in BEHIND}
    for group in groups:
        known = {node.id for node in (*before, *group)} | behind
        yield tuple(
            replace(node, dependencies=tuple(d for d in node.dependencies if d.node in known or d.kind == "data"))
            for node in group
        )
        before = group


@settings(max_examples=examples(150))
@given(st.data(), long_graphs(), st.integers(1, 14), st.integers(1, 4), st.sampled_from([None, 1, 2, 3, 5]))
def test_joined_groups_give_the_whole_graph(data, graph, num_steps, per_group, every):
    """Node for node, in its order, under staleness, offloading, evaluation and checkpoints."""
    plan = data.draw(plans(graph, FOUR_DEVICES))
    first = data.draw(st.integers(0, num_steps - 1))
    whole = in_groups(augment(graph, plan, num_steps, first, every), per_group)
    assert handed_out(StepGroups(graph, plan, num_steps, per_group, first, every)) == list(as_handed_out(list(whole)))


@pytest.mark.parametrize("name", PRESETS)
def test_under_a_preset_they_are_too(name):
    """With an evaluation that is further apart than a window is long."""
    for graph in (evaluated_twice(0, 11, 13), evaluated_twice(1, 12, 5), remax(), dpo(), following(ppo(1), 9)):
        plan = preset(name, graph, FOUR_NODES, FOUR_NODES.whole)
        if offloaded := [call.name for call in graph if call.every == 5]:
            plan = placed(plan, offloaded[0], offload="all")
        whole = in_groups(augment(graph, plan, 30, checkpoint_every=7), 2)
        found = handed_out(StepGroups(graph, plan, 30, 2, checkpoint_every=7))
        assert found == list(as_handed_out(list(whole)))


def stopped_graph(graph: DataflowGraph, plan: ExecutionPlan, steps: StepRange) -> tuple[Node, ...]:
    return unrolled_nodes(graph, plan, steps, steps.all())


def bare(node: Node) -> Node:
    """A node without its dependencies. An offload may copy weights that only a step after the stop would have used."""
    work = replace(node.work, copies=True) if isinstance(node.work, Offload) else node.work
    return replace(node, dependencies=(), reason="", work=work)


def some_submitted(data: st.DataObject, groups: StepGroups, first: int = 0) -> tuple[Groups, int]:
    """The first few groups, and the latest step that has begun. Two groups are in flight, so the others have ended."""
    submitted = [group for _ in range(data.draw(st.integers(1, 4))) if (group := groups.next_group())]
    ended = max((node.step for group in submitted[:-2] for node in group), default=first + (first > 0))
    return submitted, data.draw(st.integers(ended, max(node.step for group in submitted for node in group)))


@settings(max_examples=examples(100))
@given(
    st.data(), long_graphs(), st.integers(2, 10), st.integers(1, 3), st.sampled_from([None, 1, 2, 3, 5]), st.randoms()
)
def test_a_stopped_run_ends_with_a_checkpoint(data, graph, num_steps, per_group, every, chance):
    """Whenever it is stopped: what was handed out of its steps and what follows is the graph of a run of so many steps.

    In any order that their waits allow, also those through nodes of later steps, they find the weights they need.
    """
    plan = data.draw(plans(graph, FOUR_DEVICES))
    first = data.draw(st.integers(0, num_steps - 1))
    groups = StepGroups(graph, plan, num_steps, per_group, first, every)
    submitted, begun = some_submitted(data, groups, first)
    before = [node for group in submitted for node in group]
    last = groups.stop(begun)
    kept = [tuple(node for node in group if node.step <= last) for group in (*submitted, *handed_out(groups))]
    nodes = [node for group in kept for node in group]
    if groups.stopped_after is None:
        assert last == num_steps
        assert {node.id for node in nodes} == {node.id for node in augment(graph, plan, num_steps, first, every)}
        return
    assert begun <= last == groups.stopped_after and groups.stop(begun) == last
    if graph.staleness and every and last:
        assert groups.stopped_after % every == 0
    expected = stopped_graph(graph, plan, StepRange(num_steps, first, every, stopped=last))
    assert {bare(node) for node in nodes} == {bare(node) for node in expected} and len(nodes) == len(expected)
    assert not any(node.kind == "export" for node in nodes)
    devices = DevicesAndDisk(graph, plan, first)
    for node in in_any_order(kept, before, chance):
        devices.run(node)
    assert devices.away == devices.comes_and_goes
    assert devices.committed[-1:] == [groups.stopped_after][last == 0 :], "nothing is trained before step 1"


def in_any_order(groups: Groups, before: Sequence[Node], chance: random.Random) -> list[Node]:
    """An order that what the nodes wait for allows, when two groups are in flight.

    `before` are the nodes handed out before the stop. The void nodes among them only pass waits on.
    """
    nodes = {node.id: node for group in groups for node in group}
    names = {node.id: node.id if nodes.get(node.id) is node else f"void {node.id}" for node in before}
    rest = [node for node in nodes.values() if names.get(node.id) != node.id]
    waits: nx.DiGraph[str] = nx.DiGraph()
    waits.add_nodes_from(nodes)
    waits.add_edges_from((names.get(name, name), names[node.id]) for node in before for name in node.depends_on)
    waits.add_edges_from((name, node.id) for node in rest for name in node.depends_on)
    for number, group in enumerate(groups):
        ended = [node for earlier in groups[: max(0, number - 1)] for node in earlier if node.kind not in BEHIND]
        waits.add_edges_from((before.id, node.id) for before in ended for node in group)
    keys = {id: chance.random() for id in waits}
    order = nx.lexicographical_topological_sort(waits, key=keys.__getitem__)
    return [nodes[id] for id in order if id in nodes]


@settings(max_examples=examples(50))
@given(st.data(), long_graphs(), st.integers(2, 8), st.sampled_from([None, 1, 2, 3]))
def test_a_stopped_run_is_a_shorter_run_with_a_last_checkpoint(data, graph, num_steps, every):
    """Without an evaluation that only the end of a run has and without exports; what it waits for included."""
    plan = data.draw(plans(graph, FOUR_DEVICES, offload=False))
    stopped = data.draw(st.integers(1, num_steps - 1))
    found = stopped_graph(graph, plan, StepRange(num_steps, 0, every, stopped=stopped))
    shorter = augment(graph, plan, stopped, 0, every or 1000)
    ids = {node.id for node in found}
    before = [node for node in shorter if node.id in ids]
    expected = [replace(n, dependencies=tuple(d for d in n.dependencies if d.node in ids)) for n in before]
    if any(call.every and stopped % call.every for call in graph):  # a train_step lets weights pass to the evaluation
        found, expected = sorted(found, key=lambda node: node.id), sorted(expected, key=lambda node: node.id)
    assert list(found) == expected


def test_stopping_before_the_start_or_after_the_end_has_no_effect():
    plan = preset("flattening", ppo(), FOUR_DEVICES, FOUR_DEVICES.whole)
    waiting = StepGroups(ppo(), plan, 9, 2, finished=4)
    waiting.next_group()
    assert waiting.stop(-1) == 4
    assert waiting.next_group() == () and waiting.stopped_after == 4
    evaluated = ppo(evaluate_every=2)
    fresh = StepGroups(evaluated, preset("flattening", evaluated, FOUR_DEVICES, FOUR_DEVICES.whole), 9, 2)
    fresh.next_group()
    assert fresh.stop(-1) == -1 and fresh.next_group() == () and fresh.stopped_after == 0
    for begun in (3, 4):
        ended = StepGroups(ppo(), plan, 4, 2)
        assert len(handed_out(ended)) == 2
        assert ended.stop(begun) == 4 and ended.next_group() == () and ended.stopped_after is None


def test_the_end_of_a_stopped_run_is_near():
    """At once where no weights are offloaded; without staleness, whatever `checkpoint_every` is."""
    graph = ppo()
    plan = preset("flattening", graph, FOUR_DEVICES, FOUR_DEVICES.whole)
    groups = StepGroups(graph, plan, 100, 10, 0, 50)
    handed = {node.id for _ in range(2) for node in groups.next_group()}
    assert groups.stop(12) == 12
    rest = groups.next_group()
    assert [node.id for node in rest] == ["checkpoint.actor@12", "checkpoint.critic@12", "commit@12"]
    assert "actor_train_step@12" in handed and groups.next_group() == () and groups.stopped_after == 12


def test_a_checkpoint_that_falls_on_the_stop_is_not_written_twice():
    graph = ppo()
    groups = StepGroups(graph, preset("flattening", graph, FOUR_DEVICES, FOUR_DEVICES.whole), 9, 2, 0, 2)
    first = groups.next_group()
    assert [node.id for node in first if node.kind == "commit"] == ["commit@2"]
    assert groups.stop(2) == 2 and groups.next_group() == () and groups.stopped_after == 2


def test_only_nodes_after_the_steps_may_be_left():
    """Of a run that goes on from the checkpoint of its last step: exports, since a checkpoint waits for evaluation."""
    graph = ppo(evaluate_every=2)
    plan = preset("flattening", graph, FOUR_DEVICES, FOUR_DEVICES.whole)
    (rest,) = handed_out(StepGroups(graph, plan, 5, 2, finished=5, checkpoint_every=2))
    assert {node.id for node in rest} == {"export.actor@5", "export.critic@5"}
    assert {node.step for node in rest} == {5} and rest == augment(graph, plan, 5, 5, 2).nodes


def test_without_exports_a_run_ends_with_its_last_step():
    graph = ppo(1, 2)
    plan = preset("split", graph, FOUR_DEVICES, FOUR_DEVICES.whole)
    nodes = [node for group in handed_out(StepGroups(graph, plan, 5, 2, exports=False)) for node in group]
    assert {node.step for node in nodes} == set(range(6)) and not {"export", "commit"} & {node.kind for node in nodes}


def test_only_steps_around_a_group_are_unrolled_out_of_a_million(monkeypatch):
    """Also after a resume in the middle of it, with an evaluation and a checkpoint that are thousands of steps away."""
    graph, unrolled = ppo(1, 1000), []

    def counted(graph, plan, steps, some):
        unrolled.append(len(some))
        return unrolled_nodes(graph, plan, steps, some)

    monkeypatch.setattr(step_groups, "unrolled_nodes", counted)
    plan = preset("split", graph, FOUR_DEVICES, FOUR_DEVICES.whole)
    for first in (0, 777_777, 999_990):
        groups = StepGroups(graph, plan, 1_000_000, 4, first, 5000)
        for _ in range(4):
            groups.next_group()
        assert len(groups._handed_out) <= 3 * 4
    assert max(unrolled) <= 3 * 4 + 2 * (1 + step_groups.REACH)


ACTOR = frozenset({"actor"})


@settings(max_examples=examples(50))
@given(st.data(), long_graphs(), st.integers(2, 10), st.integers(1, 3), st.sampled_from([None, 1, 2, 3]))
def test_a_plan_that_ends_with_a_move_matches_a_stopped_run(data, graph, num_steps, per_group, every):
    """Only the moving roles are copied, and none is written, unless a regular checkpoint is due there anyway."""
    plan = data.draw(plans(graph, FOUR_DEVICES))
    end = data.draw(st.integers(1, num_steps - 1))
    groups = StepGroups(graph, plan, num_steps, per_group, 0, every, ends=PlanEnd(end + 1, ACTOR))
    nodes = [node for group in handed_out(groups) for node in group]
    assert groups.end == end and groups.stopped_after is None
    expected = stopped_graph(graph, plan, StepRange(num_steps, 0, every, stopped=end))
    is_regular = every is not None and end % every == 0

    def is_left_out(node: Node) -> bool:
        last = node.step == end and not is_regular
        other = node.kind == "checkpoint" and node.work.instance.role != "actor"
        return last and (node.kind == "commit" or other)

    found = {node.id for node in nodes}
    kept = {node.id for node in expected if not is_left_out(node)}
    copies = {id for id in kept if id.startswith(("offload", "reload"))}  # around copies that are left out
    assert kept - copies <= found <= kept


@pytest.mark.parametrize(("every", "last"), [(None, 3), (2, 3)])
def test_a_stop_before_a_switch_writes_a_checkpoint_instead(every, last):
    graph = ppo()
    plan = preset("flattening", graph, FOUR_DEVICES, FOUR_DEVICES.whole)
    groups = StepGroups(graph, plan, 9, 2, 0, every, ends=PlanEnd(4, ACTOR))
    groups.next_group()
    groups.next_group()
    assert groups.stop(3) == last and groups.stopped_after == 3
    assert [node.kind for node in groups.next_group()].count("commit") == 1


def test_a_run_that_has_switched_stops_after_a_step_whose_state_is_saved():
    graph = ppo()
    plan = preset("flattening", graph, FOUR_DEVICES, FOUR_DEVICES.whole)
    assert StepGroups(graph, plan, 9, 2, 3, is_saved=True).stop(-1) == 3
    assert StepGroups(graph, plan, 9, 2, 3, is_saved=False).stop(-1) == 4


@settings(max_examples=examples(50))
@given(st.data(), long_graphs(), st.integers(2, 10), st.integers(1, 3), st.sampled_from([None, 1, 2, 3]))
def test_a_run_leaves_its_plan_as_early_as_it_could_stop(data, graph, num_steps, per_group, every):
    """With staleness only before a regular checkpoint, with no switch in its last step; else it goes on as before."""
    plan = data.draw(plans(graph, FOUR_DEVICES))
    groups = StepGroups(graph, plan, num_steps, per_group, 0, every)
    submitted, begun = some_submitted(data, groups)
    before = [node for group in submitted for node in group]
    last = groups.switch(begun, ACTOR)
    rest = [node for group in handed_out(groups) for node in group]
    if last is None:
        assert not groups.switches and groups.end == num_steps
        assert {node.id for node in (*before, *rest)} == {node.id for node in augment(graph, plan, num_steps, 0, every)}
        return
    assert groups.switches and begun <= last == groups.end < num_steps
    assert not graph.staleness or last % every == 0
    nodes = [node for node in (*before, *rest) if node.step <= last]
    copied = [node.work.instance.role for node in nodes if node.kind == "checkpoint" and node.step == last]
    assert ("actor" in copied) == (graph.trained_by("actor") is not None)
    assert groups.switch(begun, ACTOR) is None and groups.stop(begun) == groups.end
