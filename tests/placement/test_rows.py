"""Rows: who works on which, who holds which, and what must travel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.mesh import ClusterShape, Device, DeviceMesh
from prefect_rlhf.placement.presets import preset
from prefect_rlhf.placement.rows import held_rows, needed_rows, row_transfers, split_rows
from tests.strategies import GIB, graphs, on, placed, plans, ppo

CLUSTER = ClusterShape("pair", 2, 4, 8 * GIB)
A, B, C, D = (Device(0, index) for index in range(4))


@given(dp=st.integers(1, 6), mini_batches=st.integers(1, 6), size=st.integers(1, 5))
def test_each_mini_batch_is_the_same_rows_under_every_plan(dp, mini_batches, size):
    """Replica d's m-th chunk is the d-th equal part of mini-batch m, as numpy cuts the whole batch."""
    num_rows = dp * mini_batches * size
    whole = np.arange(num_rows).reshape(mini_batches, dp, size)
    assert split_rows(num_rows, dp, mini_batches) == tuple(tuple(whole[:, d].ravel()) for d in range(dp))


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(InvalidInput, match=r"num_rows: got 6, expected a multiple of 4 \(dp 2 times 2 mini-batches\)"):
        split_rows(6, dp=2, mini_batches=2)


def test_inference_leaves_its_outputs_on_the_last_stage_of_each_replica():
    call, placement = ppo().call("ref_inference"), on("n0:0-7", "megatron", dp=2, tp=2, pp=2)
    held = held_rows(call, placement)
    assert held == {Device(0, 4): (0, 1, 2, 3), Device(0, 6): (4, 5, 6, 7)}


def test_generate_leaves_its_outputs_on_every_device_of_the_replica():
    call, placement = ppo().call("actor_generate"), on("n0:0-3", "vllm", dp=2, tp=2)
    assert held_rows(call, placement) == {A: (0, 1, 2, 3), B: (0, 1, 2, 3), C: (4, 5, 6, 7), D: (4, 5, 6, 7)}


def test_a_computation_sees_all_rows_in_one_place():
    call, placement = ppo().call("advantages"), on("n0:2", "python")
    assert needed_rows(call, placement) == held_rows(call, placement) == {C: tuple(range(8))}


def test_a_train_step_leaves_no_rows():
    assert held_rows(ppo().call("actor_train_step"), on("n0:0-1", "megatron", dp=2)) == {}


@settings(max_examples=100)
@given(st.data(), graphs())
def test_every_device_ends_with_the_rows_it_needs_and_receives_none_twice(data, graph):
    plan = data.draw(plans(graph, CLUSTER, offload=False))
    for call in graph:
        received = {}
        for move in row_transfers(graph, plan, call.name):
            held = held_rows(graph.call(move.producer), plan[move.producer])
            assert move.source != move.target
            assert set(move.rows) <= set(held[move.source])
            assert not set(move.rows) & set(held.get(move.target, ()))
            near = [device for device in held if device.node == move.target.node]
            assert move.source.node == move.target.node or not any(set(held[d]) & set(move.rows) for d in near)
            for key in move.keys:
                got = received.setdefault((move.target, move.producer, key), [])
                assert not set(move.rows) & set(got)
                got.extend(move.rows)
        for device, rows in needed_rows(call, plan[call.name]).items():
            for producer, keys in graph.reads_of(call.name).items():
                held = held_rows(graph.call(producer), plan[producer]).get(device, ())
                for key in keys:
                    assert set(rows) <= {*held, *received.get((device, producer, key), ())}


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
