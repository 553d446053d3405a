"""Sizes, moves and seconds of a model with an adapter: closed forms against its parameters, one by one."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.call_bytes import static_bytes
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.moves import reallocation_loads, reallocation_seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.layout.layout import engine_layout, held_parts, layout_of
from prefect_rlhf.placement.layout.regions import num_elements
from prefect_rlhf.placement.layout.reshard import reshard
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import num_parameters, parts, weights_of
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.planner.space.least_moves import least_move_seconds
from tests.placement.cost.test_moves import CLUSTER, SHAPES, placed
from tests.placement.planner.space.test_least_moves import as_candidate
from tests.placement.planner.space.test_least_moves import instances as anywhere
from tests.support.cases import examples
from tests.support.strategies import MIXTURE, SMALL

pytestmark = pytest.mark.quick

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EVERY = AdapterSpec(32, 32.0, MATRICES)
LLAMA = ModelSpec("actor", "", "lm", KNOWN_SHAPES["llama-7b"])
ADAPTED = replace(LLAMA, adapter=EVERY)
LONG = CallWork("train_step", 64, Workload.fixed(1024, 1024))
H100 = Hardware(DATASHEETS["h100"], 8)
DENSE = [shape for shape in SHAPES if shape.experts is None]
adapters = st.builds(
    AdapterSpec,
    st.sampled_from([1, 4, 6]),
    st.just(8.0),
    st.sets(st.sampled_from(MATRICES), min_size=1).map(lambda names: tuple(sorted(names))),
)
heads = st.sampled_from(["lm", "scalar", "lm+scalar"])


def trained_parts(model):
    return tuple(own.part for own in weights_of(model, trained=True) if own.trained)


@given(st.builds(Strategy, *[st.sampled_from([1, 2, 4])] * 2, st.integers(1, 5)), heads, adapters, st.booleans())
def test_a_device_holds_and_trains_its_layouts_part(strategy, head, adapter, tied):
    """All weights, and of them the adapter and a scalar head; more tp ranks than key-value heads have copies of B."""
    shape = replace(SMALL, num_layers=5, tied_embeddings=tied)
    model = ModelSpec("actor", "", head, shape, adapter=adapter)
    sizes, ranks = ModelSizes.of(model), tuple(range(strategy.num_devices))
    for counted, only in ((sizes.stage_parameters, tuple(parts(model))), (sizes.stage_trained, trained_parts(model))):
        layout = engine_layout(model, "megatron", strategy, ranks, only)
        for rank, at in enumerate(strategy.coordinates()):
            held = sum(num_elements(region) for region in layout.of_rank(rank).values())
            assert counted(strategy, at.pp) == held


@given(heads, adapters, st.sampled_from(DENSE))
def test_element_counts_match_the_parameters(head, adapter, shape):
    model = ModelSpec("actor", "", head, shape, adapter=adapter)
    sizes = ModelSizes.of(model)
    trained = sum(parameter.num_elements for part in trained_parts(model) for parameter in parts(model)[part])
    assert (sizes.num_parameters, sizes.num_trained) == (num_parameters(model), trained)
    assert sizes.base == ModelSizes.of(replace(model, adapter=None))


def test_a_rank_of_32_on_all_matrices_of_7b_has_80_million_parameters():
    sizes, one = ModelSizes.of(ADAPTED), Execution(Strategy())
    assert sizes.num_trained == 32 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008)) == 79_953_920
    held, whole = (static_bytes(one, each, trained=True) for each in (sizes, sizes.base))
    assert held.gradients + held.optimizer == 16 * sizes.num_trained
    assert held.weights == whole.weights + 2 * sizes.num_trained


@given(placed(), placed(generates=True), heads, adapters, st.sampled_from(DENSE))
def test_a_move_brings_the_trained_weights_alone(source, target, head, adapter, shape):
    """Each device gets as many bytes of its own, of its node and of other nodes as `reshard` moves."""
    source, target = (replace(each, strategy=replace(each.strategy, ep=1)) for each in (source, target))
    model = ModelSpec("actor", "", head, shape, adapter=adapter)
    moved = tuple(part for part in held_parts(model, target.engine) if part in trained_parts(model))
    devices, expected, found = CLUSTER.devices(), defaultdict(float), defaultdict(float)
    for piece in reshard(*(layout_of(instance, model, CLUSTER, moved) for instance in (source, target)), devices):
        giver, taker = devices[piece.source], devices[piece.target]
        span = "device" if giver == taker else "node" if giver.node == taker.node else "network"
        expected[taker, span] += piece.num_elements * 2
    loads = reallocation_loads(source, target, ModelSizes.of(model))
    found.update({(device, span): size for span, load in loads.received.items() for device, size in load.items()})
    assert found == pytest.approx(expected)


@settings(max_examples=examples(300))
@given(anywhere(order=False), anywhere(order=True), st.sampled_from((1, 2, 4)), heads, adapters)
def test_no_move_of_an_adapter_takes_less_than_its_least(source, target, kv_heads, head, adapter):
    source, target = (replace(each, strategy=replace(each.strategy, ep=1)) for each in (source, target))
    shape = replace(SMALL, num_layers=7, num_kv_heads=kv_heads, tied_embeddings=False)
    sizes = ModelSizes.of(ModelSpec("actor", "", head, shape, adapter=adapter))
    sources = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 4, NETWORKS["roce-3200"]), 4)
    least = least_move_seconds([as_candidate(source)], [as_candidate(target)], sizes, sources)[:, 0, 0]
    relation = 2 if source.mesh == target.mesh else int(source.mesh.overlaps(target.mesh))
    seconds = reallocation_seconds(source, target, sizes, sources.links((source.mesh, target.mesh)))
    assert least[relation] <= seconds * (1 + 1e-9)


def test_a_reallocation_of_7b_brings_160_mb_in_place_of_13_gb():
    mesh = DeviceMesh(0, 1, 0, 8)
    trained, read = (as_instance("megatron", Strategy(dp=8), mesh), as_instance("vllm", Strategy(dp=8), mesh))
    received = [
        next(iter(reallocation_loads(trained, read, ModelSizes.of(model)).received["device"].values()))
        for model in (ADAPTED, LLAMA)
    ]
    assert received == [2 * 79_953_920, 2 * num_parameters(LLAMA)]


def as_instance(engine, strategy, mesh):

    return ModelInstance("actor", engine, mesh, strategy)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_an_adapters_backward_has_one_product_with_the_base_instead_of_two(tp):
    """Attention and the adapter itself have both; a frozen head forms no gradient either."""
    adapted, full = (DatasheetTimes.of(ModelSizes.of(model), H100) for model in (ADAPTED, LLAMA))
    product = 64 * 1024 * 2 * full.sizes.layer_products / tp / full.flops
    own = 2 * 64 * 1024 * 2 * adapted.sizes.layer_adapter(tp) / full.flops
    change = adapted.backward(64, 1024, tp).compute - full.backward(64, 1024, tp).compute
    assert change == pytest.approx(own - product)
    assert adapted.forward(64, 1024, tp).compute - full.forward(64, 1024, tp).compute == pytest.approx(own / 2)
    heads = [each.head_backward(64 * 1024, tp).compute for each in (adapted, full)]
    assert heads[1] - heads[0] == pytest.approx(full.head_forward(64 * 1024, tp).compute)


@pytest.mark.parametrize("strategy", [Strategy(dp=8), Strategy(dp=4, tp=2), Strategy(dp=2, tp=2, pp=2)])
def test_a_train_step_with_an_adapter_takes_less_time(strategy):
    """Its gradients are of 1% of the weights, so that sums over replicas and Adam take next to nothing."""
    execution = Execution(strategy, 1, 8, micro_batches=4)
    adapted, full = (
        call_cost(LONG, execution, DatasheetTimes.of(ModelSizes.of(model), H100)) for model in (ADAPTED, LLAMA)
    )
    assert 0.6 * full.compute < adapted.compute < 0.75 * full.compute
    assert adapted.optimizer < 0.02 * full.optimizer
    assert adapted.dp_communication < 0.05 * full.dp_communication
    assert adapted.total < full.total


def test_a_decoding_step_reads_the_adapter_and_launches_its_products():
    adapted, full = (DatasheetTimes.of(ModelSizes.of(model), H100, "vllm") for model in (ADAPTED, LLAMA))
    one, other = (each.decode(8, 1024, 1, True) for each in (adapted, full))
    assert one.memory_traffic - other.memory_traffic == pytest.approx(
        2 * adapted.sizes.layer_adapter() / full.links.device
    )
    assert one.launch == pytest.approx(other.launch * (1 + 14 / 60))


def test_a_mixture_of_experts_has_no_sizes_with_an_adapter():

    with pytest.raises(GraphError, match="mixture of experts"):
        ModelSizes.of(ModelSpec("actor", "", "lm", MIXTURE, adapter=EVERY))
