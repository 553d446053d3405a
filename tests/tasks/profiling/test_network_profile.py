"""Two kinds of link are measured where there are two, and the plan that is found follows from what they take."""

from dataclasses import replace

import pytest

from prefect_rlhf.flows.hardware.node_hardware import CPU
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.times.profile import Profile, Subject
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.models.model import TransformerShape
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.tasks.profiling.bench import Sizes
from prefect_rlhf.tasks.profiling.measure import measure
from tests.support.ray_nodes import joined, ray_nodes, why_not
from tests.support.strategies import dpo, model

pytestmark = [pytest.mark.slow, pytest.mark.all, pytest.mark.skipif(bool(why_not()), reason=why_not())]

SHAPE = TransformerShape(64, 128, 4, 4, 2, 32, 64, 512, 1e4, 1e-5, True)
GRAPH = replace(dpo(), models=tuple(model(one.role, one.head, SHAPE) for one in dpo().models))
CLUSTER = ClusterShape("two", num_nodes=2, devices_per_node=2, device_memory_bytes=8 << 30)
BITS = 20e6
RATE = "20mbit"


@pytest.fixture(scope="module")
def profiles() -> dict[str, Profile]:
    """Of two machines with two devices each: over their bridge as it is, and at 20 Mbit/s."""
    subject = Subject(SHAPE, GRAPH.models[0].dtype, "cpu", "cpu", 2, "a processor", (("torch", "2"),), num_nodes=2)
    found = {}
    with ray_nodes((2, 2)) as nodes, joined(nodes):
        for name in ("fast", "slow"):
            if name == "slow":
                nodes.slow(0, RATE)
                nodes.slow(1, RATE)
            found[name] = measure(subject, Sizes(8, 64, (1, 2)), lambda number, total, words: None)
    return found


def test_the_network_and_the_links_within_a_node_are_measured(profiles):
    slow, fast = profiles["slow"].links, profiles["fast"].links
    assert 0.5 * BITS / 8 < slow.network < 1.2 * BITS / 8
    assert fast.network > 10 * slow.network and slow.node > 10 * slow.network
    assert min(slow.network_latency_seconds, fast.network_latency_seconds) > 0
    assert Profile.from_json(profiles["slow"].to_json()) == profiles["slow"]


def test_a_slow_network_keeps_training_within_a_node(profiles):
    """On the same times of layers, with the network of the one profile and of the other, for few rows to many."""

    def nodes_of_training(network, rows):
        profile = replace(profiles["fast"], links=profiles[network].links)
        hardware = replace(CPU, devices_per_node=2, network=NETWORKS["infiniband-200"])
        site = Site(CLUSTER, CLUSTER.whole, CostSources((hardware,) * 2, (profile,)), "cpu")
        graph = replace(GRAPH, calls=tuple(replace(one, num_rows=rows) for one in GRAPH))
        plan = plan_graph(Question(graph, site, Workload.fixed(rows, 200)), budget_seconds=2.0).plan
        return plan["actor_train_step"].mesh.num_nodes

    nodes = [(nodes_of_training("fast", rows), nodes_of_training("slow", rows)) for rows in (8, 16, 32, 64, 128)]
    assert (2, 1) in nodes and (1, 2) not in nodes
