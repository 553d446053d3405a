"""What a run's processes take of a CPU host, beside the tensors that its certificate counts."""

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.certificate import certify
from prefect_rlhf.placement.memory.overhead import DEVICE
from prefect_rlhf.placement.memory.processes import (
    ALLOCATOR_SHARES,
    ALONE_BYTES,
    FORK_SERVER_BYTES,
    RANK_BYTES,
    RUN_BYTES,
    SERVER_BYTES,
    host_needs,
)
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.support.strategies import GIB, TWO_DEVICES, placed, ppo

ONE, TWO_NODES = ClusterShape("one", 1, 1, 8 * GIB), ClusterShape("nodes", 2, 2, 8 * GIB)

WORK = Workload.fixed(8, 8)


def certificate(cluster, **offloaded):
    plan = preset("flattening", ppo(), cluster, cluster.whole)
    for name, part in offloaded.items():
        plan = placed(plan, name, offload=part)
    return certify(augment(ppo(), plan, 3), WORK, "cpu")


def test_tensors_of_all_ranks_programs_and_copies_on_the_host_add_up():
    """The fragments of a device are a part of its memory, not bytes that a process takes."""
    found = certificate(TWO_DEVICES, ref_inference="all")
    (need,) = host_needs(found).values()
    shares = [share for peak in found.peaks for share in peak.shares if share.owner != DEVICE]
    assert need.tensor_bytes == sum(share.num_bytes for share in shares)
    assert need.copied_bytes == found.hosts[0].num_bytes > 0
    assert need.program_bytes == SERVER_BYTES + RUN_BYTES + FORK_SERVER_BYTES + 2 * RANK_BYTES
    counted = need.tensor_bytes + need.copied_bytes + need.program_bytes
    kept = tuple(counted + int(share * need.tensor_bytes) for share in ALLOCATOR_SHARES)
    assert need.usual_bytes == kept and need.least_bytes < counted < kept[0] < kept[1]
    assert "of programs" in str(need) and "of copies in host memory" in str(need)


def test_a_single_rank_is_in_the_runs_own_process():
    (need,) = host_needs(certificate(ONE)).values()
    assert need.program_bytes == SERVER_BYTES + ALONE_BYTES


def test_the_least_has_no_activations_no_cache_and_half_of_the_programs():
    found = certificate(TWO_DEVICES)
    (need,) = host_needs(found).values()
    kept = sum(
        share.num_bytes
        for peak in found.peaks
        for share in peak.shares
        if not share.passing and share.owner != DEVICE and share.what != "key-value cache"
    )
    assert need.least_bytes == kept + need.program_bytes // 2


def test_each_node_has_its_own_ranks_and_the_first_the_run():
    first, *others = host_needs(certificate(TWO_NODES)).values()
    assert first.program_bytes - others[0].program_bytes == SERVER_BYTES + RUN_BYTES
