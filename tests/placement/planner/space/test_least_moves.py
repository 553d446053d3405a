"""The least that a move of weights takes is never more than the move takes, wherever and in whatever order it goes."""

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.cost.datasheets.hardware import Links
from prefect_rlhf.placement.cost.moves import reallocation_seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.model import Experts, TransformerShape
from prefect_rlhf.placement.plan import ModelInstance
from prefect_rlhf.placement.planner.space.least_moves import Spread, network_layers
from tests.cases import examples

SHAPE = TransformerShape(64, 128, 7, 4, 4, 16, 32, 128, 1e4, 1e-5, tied_embeddings=False)
SIZES = ModelSizes.of_shape(replace(SHAPE, family="mixtral", experts=Experts(8, 2)))
LINKS = Links(device=1e15, node=1e15, network=1e9, host=1e9)
MESHES = [
    *(DeviceMesh(first, count, 0, 4) for count in (1, 2, 3, 4) for first in range(5 - count)),
    *(DeviceMesh(node, 1, first, 2) for node in range(4) for first in (0, 2)),
]


@st.composite
def instances(draw, order):
    mesh = draw(st.sampled_from(MESHES))
    size = mesh.num_devices
    tp = draw(st.sampled_from([degree for degree in (1, 2, 4) if size % degree == 0]))
    pp = draw(st.sampled_from([degree for degree in range(1, 7) if size // tp % degree == 0]))
    dp = size // tp // pp
    strategy = Strategy(dp, tp, pp, draw(st.sampled_from([ep for ep in (1, 2, 4, 8) if dp % ep == 0])))
    places = tuple(draw(st.permutations(range(size)))) if order else ()
    return ModelInstance("actor", "megatron", mesh, strategy, places)


def layer_bytes(strategy):
    """Of what tp splits of a layer, on one device: of experts also what ep leaves it."""
    return (SIZES.layer_matrices + SIZES.layer_experts / strategy.ep) / strategy.tp * SIZES.item


@settings(max_examples=examples(500))
@given(instances(order=False), instances(order=True))
def test_no_move_takes_less_than_its_least_over_the_network(source, target):
    layers = network_layers(Spread.of(source), (Spread.of(target),), SIZES.num_layers)[0]
    least = layers * layer_bytes(target.strategy) / LINKS.network
    assert least <= reallocation_seconds(source, target, SIZES, LINKS) * (1 + 1e-9)


@settings(max_examples=examples(500))
@given(instances(order=True), instances(order=True))
def test_between_nodes_that_have_nothing_in_common_all_layers_cross_the_network(source, target):
    nodes = [set(range(one.mesh.first_node, one.mesh.first_node + one.mesh.num_nodes)) for one in (source, target)]
    assume(nodes[0].isdisjoint(nodes[1]))
    apart = network_layers(Spread.of(source), (Spread.of(target),), SIZES.num_layers, apart=True)[0]
    least = apart * layer_bytes(target.strategy) / LINKS.network
    assert apart >= network_layers(Spread.of(source), (Spread.of(target),), SIZES.num_layers)[0]
    assert least <= reallocation_seconds(source, target, SIZES, LINKS) * (1 + 1e-9)


def test_a_copy_on_every_node_of_a_pipeline_over_nodes():
    """16 nodes of 8 want all of 16 layers, each in eighths on a node; each node of 16 has one. A device lacks an eighth
    of 15 layers, and a layer's 8 holders send 15 nodes an eighth of it for each of 8 devices."""
    one_node, all_nodes = Spread(pp=1, group=8, per_node=8), Spread(pp=1, group=128, per_node=8)
    assert list(network_layers(Spread(pp=16, group=8, per_node=8), (one_node, all_nodes), 16))[1] == 15
    assert network_layers(one_node, (one_node,), 16) == [0]
