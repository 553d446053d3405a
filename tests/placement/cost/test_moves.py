"""Seconds of moving weights and rows: the closed form against `reshard`, HybridFlow's table 2, links by hand."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.hardware import Links
from prefect_rlhf.placement.cost.moves import (
    Flow,
    host_seconds,
    move_seconds,
    reallocation_loads,
    reallocation_seconds,
    row_bytes,
    transfer_loads,
)
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import Device, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.alignment import overlapping_order
from prefect_rlhf.placement.layout.layout import held_parts, layout_of
from prefect_rlhf.placement.layout.reshard import reshard
from prefect_rlhf.placement.models.model import QUERY_BIASES, ModelSpec
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.rows.moves import DeviceTransfer
from tests.support.strategies import GEMMA3, MIXTURE, SMALL, divisors

pytestmark = pytest.mark.quick

LINKS = Links(device=1e12, node=1e11, network=1e10, host=2e10)
CLUSTER = DeviceMesh(0, 2, 0, 4)
MESHES = [CLUSTER, *(DeviceMesh(node, 1, 0, 4) for node in (0, 1)), DeviceMesh(0, 1, 0, 2), DeviceMesh(1, 1, 2, 2)]
SHAPE = replace(SMALL, num_layers=6, num_kv_heads=4, tied_embeddings=False)
SHAPES = [
    SHAPE,
    replace(SHAPE, num_kv_heads=2, biases=QUERY_BIASES, family="qwen2"),
    replace(SHAPE, num_kv_heads=1, qk_norm=True, family="qwen3"),
    replace(GEMMA3, num_layers=6),
    replace(MIXTURE, num_layers=6),
]
"""Key-value heads that tp splits, and that several of its ranks have copies of; experts."""


@st.composite
def placed(draw, generates=False):
    """An instance on some part of two nodes of four devices."""
    mesh = draw(st.sampled_from(MESHES))
    tp = draw(st.sampled_from([d for d in (1, 2, 4) if mesh.num_devices % d == 0]))
    pp = draw(st.sampled_from([d for d in (1, 2, 4) if mesh.num_devices // tp % d == 0]))
    order = tuple(draw(st.permutations(range(mesh.num_devices))))
    engine = draw(st.sampled_from(["megatron", "vllm"])) if pp == 1 and generates else "megatron"
    dp = mesh.num_devices // tp // pp
    ep = draw(st.sampled_from(divisors(dp) if engine == "megatron" else [1, dp]))
    return ModelInstance("actor", engine, mesh, Strategy(dp, tp, pp, ep), order)


def with_experts_of(shape, *instances):
    """The instances as a model of this shape may be placed: a dense one has ep 1."""
    return [i if shape.experts else replace(i, strategy=replace(i.strategy, ep=1)) for i in instances]


@given(placed(), placed(generates=True), st.sampled_from(["lm", "scalar", "lm+scalar"]), st.sampled_from(SHAPES))
def test_the_closed_form_moves_what_reshard_moves(source, target, head, shape):
    """To every device as many bytes from itself, from its node and from other nodes."""
    source, target = with_experts_of(shape, source, target)
    model = ModelSpec("actor", "", head, shape)
    devices = CLUSTER.devices()
    held = held_parts(model, target.engine)
    plan = reshard(*(layout_of(instance, model, CLUSTER, held) for instance in (source, target)), devices)
    expected, found = defaultdict(float), defaultdict(float)
    for piece in plan:
        flow = Flow(devices[piece.source], devices[piece.target], piece.num_elements * 2)
        expected[flow.target, flow.span] += flow.num_bytes
    loads = reallocation_loads(source, target, ModelSizes.of(model))
    found.update({(device, span): size for span, load in loads.received.items() for device, size in load.items()})
    for span, load in loads.sent.items():
        assert sum(load.values()) == pytest.approx(sum(loads.received[span].values()))
    assert found == pytest.approx(expected)


@given(placed(), placed(), st.sampled_from(SHAPES))
def test_both_give_about_the_same_seconds(source, target, shape):
    """`reshard` chooses one holder for each piece, the closed form spreads them: at most a busier link by chance."""
    source, target = with_experts_of(shape, source, target)
    model = ModelSpec("actor", "", "lm", shape)
    devices = CLUSTER.devices()
    plan = reshard(*(layout_of(instance, model, CLUSTER) for instance in (source, target)), devices)
    exact = move_seconds((Flow(devices[p.source], devices[p.target], p.num_elements * 2) for p in plan), LINKS)
    quick = reallocation_seconds(source, target, ModelSizes.of(model), LINKS)
    assert quick <= 1.2 * exact
    assert exact <= 4 * quick


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_aligned_generation_receives_what_hybridflow_says(tp):
    """Its table 2: (t p - t_g p_g) / (t_g p_g t p) of the model per device, from training with p 1, t 8, d 2."""
    mesh = DeviceMesh(0, 2, 0, 8)
    model = ModelSpec("actor", "", "lm", replace(SMALL, num_attention_heads=8, num_kv_heads=8, tied_embeddings=False))
    trained = ModelInstance("actor", "megatron", mesh, Strategy(dp=2, tp=8))
    plain = ModelInstance("actor", "megatron", mesh, Strategy(dp=16 // tp, tp=tp))
    aligned = replace(plain, device_order=overlapping_order(plain, trained, model))
    sizes = ModelSizes.of(model)
    loads = reallocation_loads(trained, aligned, sizes)
    assert "network" not in loads.received
    received = loads.received["node"]
    split = sizes.item * (sizes.num_layers * sizes.layer_matrices + 2 * sizes.table)  # all but the norms
    expected = (8 - tp) / (tp * 8) * split
    assert max(received.values(), default=0) == pytest.approx(expected)


def test_a_move_takes_as_long_as_its_busiest_link():
    here, there, far = Device(0, 0), Device(0, 1), Device(1, 0)
    assert move_seconds([], LINKS) == 0
    assert move_seconds([Flow(here, there, 1e11)], LINKS) == pytest.approx(1)
    assert move_seconds([Flow(here, far, 1e11)], LINKS) == pytest.approx(10)
    both_ways = [Flow(here, far, 1e11), Flow(far, here, 1e11)]
    assert move_seconds(both_ways, LINKS) == pytest.approx(10)
    assert move_seconds([*both_ways, Flow(there, far, 1e11)], LINKS) == pytest.approx(20)


def test_rows_take_their_keys_bytes():
    transfers = [DeviceTransfer(Device(0, 0), Device(1, 0), "generate", ("tokens", "logprobs"), tuple(range(100)))]
    workload = Workload.fixed(30, 10)
    assert row_bytes(("tokens", "logprobs"), workload) == 40 * 8 + 10 * 4
    loads = transfer_loads(transfers, workload)
    assert loads.sent == {"network": {Device(0, 0): 100 * 360}}
    assert loads.received == {"network": {Device(1, 0): 100 * 360}}


def test_offloading_takes_the_host_link():
    assert host_seconds(4e10, LINKS) == pytest.approx(2)


@given(placed(), placed(), st.floats(1, 50))
def test_slower_links_take_longer_in_proportion(source, target, factor):
    sizes, links = ModelSizes.of_shape(SHAPE), replace(LINKS, device=float("inf"))
    slower = replace(links, node=links.node / factor, network=links.network / factor)
    moved = reallocation_seconds(source, target, sizes, links)
    assert reallocation_seconds(source, target, sizes, slower) == pytest.approx(factor * moved)


def test_unconnected_nodes_are_reported_in_one_line():
    with pytest.raises(InvalidInput, match="expected a network between nodes"):
        move_seconds([Flow(Device(0, 0), Device(1, 0), 1)], replace(LINKS, network=0))
