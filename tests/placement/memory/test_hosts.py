"""What leaves the devices has room in the memory of their hosts, or the plan does not fit and the error says why."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import PlanDoesNotFit
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.fit import check_fits
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.placement.planner.test_planner import GRAPHS, WORKLOAD
from tests.support.strategies import GIB, TWO_DEVICES, on, placed, ppo

GRAPH = GRAPHS["dpo"]
TWO_NODES = ClusterShape("two", 2, 2, 80 * GIB)
APART = ExecutionPlan(
    "apart",
    TWO_NODES,
    (("ref_inference", on("n1:0-1", "megatron", dp=2)), ("actor_train_step", on("n0:0-1", "megatron", dp=2))),
)
REFERENCE = placed(APART, "ref_inference", offload="all")
WEIGHTS = ModelSizes.of(GRAPH.model("ref")).num_parameters * 2


def with_room(plan: ExecutionPlan, num_bytes: int) -> ExecutionPlan:
    return replace(plan, cluster=replace(plan.cluster, host_memory_bytes=num_bytes))


def test_without_offloading_hosts_keep_no_bytes():
    certificate = check_fits(with_room(APART, 1), GRAPH, WORKLOAD, "cuda")
    assert certificate.hosts == () and "host" not in certificate.table()


def test_each_replica_has_a_copy_on_its_host():
    certificate = check_fits(REFERENCE, GRAPH, WORKLOAD, "cuda")
    (host,) = certificate.hosts
    assert (host.node, host.host_bytes) == (1, 0)
    assert 2 * WEIGHTS <= host.num_bytes <= 2 * WEIGHTS * 1.01  # padding
    assert f"the host of n1 keeps {byte_size(host.num_bytes)}" in certificate.table()


def test_gradients_stay_out_of_the_hosts_memory():
    """Main weights and two moments, 12 bytes a parameter, are shared over dp; the weights stay on the devices."""
    certificate = check_fits(placed(APART, "actor_train_step", offload="optimizer"), GRAPH, WORKLOAD, "cuda")
    (host,) = certificate.hosts
    assert host.node == 0 and WEIGHTS * 6 <= host.num_bytes <= WEIGHTS * 6 * 1.01


def test_a_copy_that_is_overwritten_needs_no_host_memory():
    """vLLM's copy is dropped after use; under staleness 1 the first version is needed twice, so it has a buffer."""
    for staleness, hosts in ((0, 0), (1, 1)):
        graph = ppo(staleness)
        plan = preset("flattening", graph, TWO_DEVICES, TWO_DEVICES.whole)
        asleep = check_fits(placed(plan, "actor_generate", offload="all"), graph, Workload.fixed(8, 8), "cpu")
        assert len(asleep.hosts) == hosts


def test_an_exactly_full_host_is_accepted_and_a_byte_less_is_refused():
    (host,) = check_fits(REFERENCE, GRAPH, WORKLOAD, "cuda").hosts
    assert check_fits(with_room(REFERENCE, host.num_bytes), GRAPH, WORKLOAD, "cuda").excess_bytes == 0
    with pytest.raises(PlanDoesNotFit, match=r"memory of the host of n1.*offloaded"):
        check_fits(with_room(REFERENCE, host.num_bytes - 1), GRAPH, WORKLOAD, "cuda")


def test_a_checkpoint_has_a_copy_of_main_weights_and_moments_on_the_hosts_that_train():
    """12 bytes a parameter, a single copy whatever the number of replicas; with offloads both count."""
    writing = replace(WORKLOAD, has_checkpoints=True)
    (host,) = check_fits(APART, GRAPH, writing, "cuda").hosts
    assert host.node == 0 and host.num_bytes == host.checkpoint_bytes
    assert WEIGHTS * 6 <= host.checkpoint_bytes <= WEIGHTS * 6 * 1.01
    assert (
        f"{byte_size(host.checkpoint_bytes)} of it for a checkpoint"
        in check_fits(APART, GRAPH, writing, "cuda").table()
    )
    moved = placed(APART, "actor_train_step", offload="optimizer")
    (both,), (alone,) = (check_fits(moved, GRAPH, work, "cuda").hosts for work in (writing, WORKLOAD))
    assert both.num_bytes == alone.num_bytes + host.checkpoint_bytes
    with pytest.raises(PlanDoesNotFit, match=r"memory of the host of n0.*copied for a checkpoint"):
        check_fits(with_room(moved, both.num_bytes - 1), GRAPH, writing, "cuda")
