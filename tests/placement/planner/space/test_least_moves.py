"""The least that a move of weights takes is never more than the move takes, wherever and in whatever order it goes."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware, Links, Network
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.moves import reallocation_seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.model import Experts, TransformerShape
from prefect_rlhf.placement.plan import ModelInstance, Placement
from prefect_rlhf.placement.planner.space.candidates import Candidate, MemoryBounds
from prefect_rlhf.placement.planner.space.least_moves import Chain, Spread, least_move_seconds, network_layers
from tests.support.cases import examples

SHAPE = TransformerShape(64, 128, 7, 4, 4, 16, 32, 128, 1e4, 1e-5, tied_embeddings=False)
SIZES = ModelSizes.of_shape(replace(SHAPE, family="mixtral", experts=Experts(8, 2)))
FAST_AND_SLOW = (Network("as fast as links within a node", 1.6e12, "a test"), NETWORKS["roce-3200"])
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


def least_seconds(source, target):
    """[3]: without a common node, on meshes that overlap and are not equal, and with any common nodes."""
    chain, layer_bytes = Chain.of(SIZES.held_by(target.engine), target.strategy.ep)
    layers = network_layers(Spread.of(source), (Spread.of(target),), chain)[:, 0]
    return layers * layer_bytes / target.strategy.tp / LINKS.network


@settings(max_examples=examples(500))
@given(instances(order=False), instances(order=True))
def test_no_move_takes_less_than_its_least_over_the_network(source, target):
    """Without a common node, all layers and both tables cross the network."""
    nodes = [set(range(one.mesh.first_node, one.mesh.first_node + one.mesh.num_nodes)) for one in (source, target)]
    apart, overlapping, common = least_seconds(source, target)
    overlap = source.mesh.overlaps(target.mesh) and source.mesh != target.mesh
    least = apart if nodes[0].isdisjoint(nodes[1]) else overlapping if overlap else common
    assert common <= overlapping <= apart * (1 + 1e-9)
    assert least <= reallocation_seconds(source, target, SIZES, LINKS) * (1 + 1e-9)


@settings(max_examples=examples(500))
@given(instances(order=False), instances(order=True), st.sampled_from(FAST_AND_SLOW), st.sampled_from((2, 4)))
def test_no_move_takes_less_than_its_least(source, target, network, kv_heads):
    """Also within a node, where a device keeps a part of what it needs, of models whose devices have copies of keys."""
    sources = CostSources.equal_nodes(Hardware(DATASHEETS["h100"], 4, network), 4)
    for sizes in (replace(SIZES, kv_heads=kv_heads), ModelSizes.of_shape(replace(SHAPE, num_kv_heads=kv_heads))):
        least = least_move_seconds([as_candidate(source)], [as_candidate(target)], sizes, sources)[:, 0, 0]
        relation = 2 if source.mesh == target.mesh else int(source.mesh.overlaps(target.mesh))
        seconds = reallocation_seconds(source, target, sizes, sources.links((source.mesh, target.mesh)))
        assert least[relation] <= seconds * (1 + 1e-9)


def as_candidate(instance):
    placement = Placement(instance.mesh, instance.strategy, instance.engine)
    return Candidate(placement, 0, 0.0, 0.0, 0.0, MemoryBounds(0, 0), MemoryBounds(0, 0), 0)


def test_a_copy_on_every_node_of_a_pipeline_over_nodes():
    """16 nodes of 8 want all of 16 layers, each in eighths on a node; each node of 16 has a layer. A device lacks an
    eighth of 15 layers, and a layer's 8 holders send 15 nodes an eighth of it for each of 8 devices. Of a table before
    the first layer and a table after the last, a device on 14 of the nodes lacks both."""
    one_node, all_nodes = Spread(pp=1, group=8, per_node=8), Spread(pp=1, group=128, per_node=8)
    pipeline, layers, with_tables = Spread(pp=16, group=8, per_node=8), Chain(16), Chain(16, 2.0, 3.0)
    assert network_layers(pipeline, (one_node, all_nodes), layers)[2].tolist() == [15, 15]
    assert network_layers(pipeline, (one_node, all_nodes), with_tables)[2].tolist() == [17, 60]
    assert network_layers(one_node, (one_node,), layers).tolist() == [[16], [0], [0]]


def test_two_of_the_three_nodes_of_a_pipeline_lack_the_rest_of_it():
    """Four stages of 12 layers lie on nodes 0, 0 and 1, 1 and 2, 2. Wherever two nodes of 8 lie there, 6 holders of a
    stage send it to both: an eighth of 12 layers for each of 16 devices."""
    (near,) = network_layers(Spread(pp=4, group=6, per_node=8), (Spread(pp=1, group=16, per_node=8),), Chain(48))[1]
    assert near == 12 * 16 / 6


def test_a_copy_next_to_most_of_its_source_gets_its_bytes_there():
    """Nodes 1 and 2 have all of a model, nodes 0 and 1 want it: devices on node 0 get all of it, others nothing."""
    on_two = Spread(pp=1, group=16, per_node=8)
    assert network_layers(on_two, (on_two,), Chain(48)).tolist() == [[48], [48], [0]]
