"""Rows: who works on which, who holds which, and what must travel. The oracle counts (key, row) device by device."""

import random
from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.devices.mesh import ClusterShape, Device, DeviceMesh
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.rows.moves import row_moves, row_transfers
from prefect_rlhf.placement.rows.partition import RowPartition
from prefect_rlhf.placement.rows.shares import partition_of, placed_call, rows_held
from tests.support.cases import examples
from tests.support.strategies import GIB, dpo, graphs, on, placed, plans, ppo

pytestmark = pytest.mark.quick

CLUSTER = ClusterShape("pair", 2, 4, 8 * GIB)
UNEVEN = replace(CLUSTER, node_speeds=(1.0, 0.5))
A, B, C, D = (Device(0, index) for index in range(4))
LENGTHS = {"actor_generate": (9, 8, 1, 1, 1, 1, 1, 1)}


def plan_of(graph, **placements):
    """Everything on one device but what is told."""
    cluster = CLUSTER
    plan = preset("flattening", graph, cluster, DeviceMesh(0, 1, 0, 1))
    return ExecutionPlan("mine", cluster, tuple((name, placements.get(name, p)) for name, p in plan.placements))


def rows_at(shares, lengths=None):
    return {device: share.rows(lengths) for device, share in shares.items()}


def needed_at(graph, plan, name, lengths=None):
    return {device: need.share.rows(lengths) for device, need in placed_call(graph, plan, name).needs().items()}


def test_inference_leaves_its_outputs_on_the_last_stage_of_each_replica():
    plan = plan_of(ppo(), ref_inference=on("n0-1:0-3", "megatron", dp=2, tp=2, pp=2))
    held = rows_at(rows_held(ppo(), plan, "ref_inference"))
    assert held == {Device(1, 0): (0, 1, 2, 3), Device(1, 2): (4, 5, 6, 7)}


def test_generate_leaves_its_outputs_on_every_device_of_the_replica():
    plan = plan_of(ppo(), actor_generate=on("n0:0-3", "vllm", dp=2, tp=2))
    held = rows_at(rows_held(ppo(), plan, "actor_generate"), LENGTHS)
    assert held == {A: (0, 1, 2, 3), B: (0, 1, 2, 3), C: (4, 5, 6, 7), D: (4, 5, 6, 7)}


def test_a_computation_sees_all_rows_on_the_same_device():
    plan = plan_of(ppo(), advantages=on("n0:2", "python"))
    everything = {C: tuple(range(8))}
    assert needed_at(ppo(), plan, "advantages", LENGTHS) == everything
    assert rows_at(rows_held(ppo(), plan, "advantages"), LENGTHS) == everything


def test_a_train_step_leaves_no_rows():
    assert rows_held(ppo(), plan_of(ppo()), "actor_train_step") == {}


def test_replicas_get_as_many_tokens_as_each_other():
    """9 + 1 + 1 + 1 and 8 + 1 + 1 + 1 tokens, where halves of the rows would be 19 and 4."""
    plan = plan_of(ppo(), ref_inference=on("n0:0-1", "megatron", dp=2))
    needed = needed_at(ppo(), plan, "ref_inference", LENGTHS)
    assert sorted(sum(LENGTHS["actor_generate"][row] for row in rows) for rows in needed.values()) == [11, 12]


def test_calls_on_the_same_rows_are_partitioned_alike():
    """Inference follows the train_step's mini-batches, of actor and critic the finer ones."""
    graph = ppo(mini_batches=2)
    finer = tuple(replace(c, mini_batches=4) if c.name == "critic_train_step" else c for c in graph)
    graph = replace(graph, calls=finer)
    plan = preset("flattening", graph, CLUSTER, DeviceMesh(0, 1, 0, 2))
    rules = {partition_of(graph, plan, call.name) for call in graph if call.kind in ("inference", "train_step")}
    assert rules == {RowPartition(8, (1.0, 1.0), 4, 1, "actor_generate")}
    assert "critic_inference" not in [move.producer for move in row_moves(graph, plan, "critic_train_step")]
    (share,) = {
        need.share for need in placed_call(graph, plan, "actor_train_step").needs().values() if need.share.replica == 0
    }
    assert share.mini_batch_sizes(2, LENGTHS) == (2, 2)


def test_rows_of_equal_length_stay_where_they_were_generated():
    """The transfer is in the graph, since lengths are not known when it is made, but it then moves nothing."""
    graph = ppo(mini_batches=2)
    plan = preset("flattening", graph, CLUSTER, DeviceMesh(0, 1, 0, 2))
    assert row_moves(graph, plan, "ref_inference")
    assert not row_transfers(graph, plan, "ref_inference", told={"actor_generate": (5,) * 8})


def test_rows_of_a_dataset_are_dealt_by_count():
    """No generate reports their lengths; inference and train_step agree all the same."""
    graph = dpo()
    plan = preset("flattening", graph, CLUSTER, DeviceMesh(0, 1, 0, 2))
    assert partition_of(graph, plan, "ref_inference") == RowPartition(8, (1.0, 1.0), 1, 2)
    assert partition_of(graph, plan, "actor_train_step") == RowPartition(8, (1.0, 1.0), 1, 2)


def test_replicas_on_slower_nodes_get_fewer_rows():
    """Node 1 has half the speed of node 0."""
    plan = replace(plan_of(ppo(), actor_generate=on("n0-1:0-3", "vllm", dp=4, tp=2)), cluster=UNEVEN)
    held = rows_at(rows_held(ppo(), plan, "actor_generate"))
    assert [len(held[device]) for device in (A, C, Device(1, 0), Device(1, 2))] == [3, 3, 1, 1]


def keys_by_stage(output, head_keys=("tokens", "prompt_length", "logprobs", "truncated")):
    """The keys that each of three stages needs for one kind of output, or for training."""
    graph = ppo()
    name = {"logprobs": "ref_inference", "values": "critic_inference", "scores": "reward_inference"}.get(output)
    name = name or "actor_train_step"
    cluster = ClusterShape("three", 3, 2, 8 * GIB)
    placement = on("n0-2:0-1", "megatron", pp=3, tp=2)
    plan = replace(plan_of(graph, **{name: placement}), cluster=cluster)
    found = [need.keys for need in placed_call(graph, plan, name).needs().values()]
    assert found[0::2] == found[1::2], "tensor-parallel ranks of a stage need the same"
    return [set(keys) for keys in found[0::2]]


def test_a_stage_needs_only_the_keys_it_uses():
    """Tokens where they are embedded or looked up; what a loss may see on the last stage; in between nothing."""
    assert keys_by_stage("logprobs") == [{"tokens"}, set(), {"tokens", "prompt_length"}]
    assert keys_by_stage("values") == [{"tokens"}, set(), {"prompt_length"}]
    assert keys_by_stage("scores") == [{"tokens"}, set(), set()]
    columns = {"tokens", "prompt_length", "logprobs", "truncated", "advantages"}
    assert keys_by_stage("train") == [{"tokens"}, set(), columns]


def test_transfers_move_no_key_to_a_stage_that_does_not_use_it():
    """Eight rows of tokens to the first stage; of all columns to the last: 8 * 1 + 8 * 5, not 16 * 5."""
    graph = ppo()
    plan = plan_of(graph, actor_train_step=on("n0:2-3", "megatron", pp=2))
    moved = defaultdict(int)
    for move in row_transfers(graph, plan, "actor_train_step", told=LENGTHS):
        moved[move.target] += len(move.keys) * len(move.rows)
    assert moved == {C: 8, D: 8 * 5}


def makes(call, at, strategy):
    """Whether a coordinate has the call's outputs afterwards, spelled out."""
    if call.kind == "inference":
        return (at.tp, at.pp) == (0, strategy.pp - 1)
    return call.kind != "train_step"


@settings(max_examples=examples(150))
@given(st.data(), graphs(), st.sampled_from([CLUSTER, UNEVEN]), st.integers(0, 1000))
def test_every_device_receives_exactly_its_missing_rows(data, graph, cluster, seed):
    """Whatever the lengths: who holds and needs which (key, row) is counted one by one."""
    plan = data.draw(plans(graph, cluster, offload=False))
    draw = random.Random(seed)
    lengths = {c.name: tuple(draw.randint(1, 60) for _ in range(c.num_rows)) for c in graph if c.kind == "generate"}
    made = set()  # (device, call, key, row)
    for call in graph:
        for device, rows in needed_at(graph, plan, call.name, lengths).items():
            at = dict(zip(plan[call.name].devices, plan[call.name].strategy.coordinates(), strict=True))[device]
            if makes(call, at, plan[call.name].strategy):
                made |= {(device, call.name, key, row) for key in call.outputs for row in rows}
    for call in graph:
        have = set(made)
        for move in row_transfers(graph, plan, call.name, told=lengths):
            sent = {(move.producer, key, row) for key in move.keys for row in move.rows}
            assert move.source != move.target
            assert {(move.source, *what) for what in sent} <= made
            assert not {(move.target, *what) for what in sent} & have
            near = [d for d in rows_held(graph, plan, move.producer) if d.node == move.target.node]
            assert move.source.node == move.target.node or not any((d, *what) in made for d in near for what in sent)
            have |= {(move.target, *what) for what in sent}
        for device, need in placed_call(graph, plan, call.name).needs().items():
            for producer, keys in graph.reads_of(call.name).items():
                rows_each = call.num_rows // graph.call(producer).num_rows
                for key in need.keys & set(keys):
                    rows = {row // rows_each for row in need.share.rows(lengths)}
                    assert {(device, producer, key, row) for row in rows} <= have


@settings(max_examples=examples(60))
@given(st.data(), graphs())
def test_every_row_passes_each_stage_of_a_single_replica(data, graph):
    """Over the replicas of a stage and tensor-parallel rank, the rows are all rows, each once."""
    plan = data.draw(plans(graph, UNEVEN, offload=False))
    for call in graph:
        rows = defaultdict(list)
        coordinates = plan[call.name].strategy.coordinates()
        for need, at in zip(placed_call(graph, plan, call.name).needs().values(), coordinates, strict=True):
            rows[at.pp, at.tp] += need.share.rows()
        assert all(sorted(found) == list(range(call.num_rows)) for found in rows.values())


def test_sources_share_the_load():
    """Two holders of the same rows send about half each."""
    graph = ppo()
    plan = preset("flattening", graph, CLUSTER, DeviceMesh(0, 1, 0, 4))
    plan = placed(plan, "actor_generate", mesh="n0:0-1", dp=1, tp=2)
    plan = placed(plan, "ref_inference", mesh="n0:2-3", dp=1, tp=2)
    sent = {A: 0, B: 0}
    for move in row_transfers(graph, plan, "ref_inference"):
        sent[move.source] += len(move.rows)
    assert sent == {A: 8, B: 8}


@pytest.mark.parametrize(("tp", "heard"), [(1, 4), (2, 2), (4, 1)])
def test_devices_that_need_the_same_rows_share_their_holders_out(tp, heard):
    """Of four devices that hold all rows each of `tp` hears from as few as leaves none idle, and all send alike."""
    generates = on("n0:0-3", "vllm", tp=4)
    plan = plan_of(ppo(), actor_generate=generates, ref_inference=on(f"n1:0-{tp - 1}", "megatron", tp=tp))
    peers, sent = defaultdict(set), defaultdict(int)
    for move in row_transfers(ppo(), plan, "ref_inference", told=LENGTHS):
        peers[move.target].add(move.source)
        sent[move.source] += len(move.rows)
    assert {target: len(sources) for target, sources in peers.items()} == {Device(1, at): heard for at in range(tp)}
    assert sent == dict.fromkeys(generates.devices, 8 * tp // 4)
