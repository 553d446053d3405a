"""What devices hold besides tensors: groups counted member by member, and every term in the certificate's table."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.memory.bytes import CONTEXT_BYTES, enough_bytes, usable_bytes
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.overhead import DEVICE, call_overhead, communicator_bytes, overhead, torch_limits
from prefect_rlhf.placement.plan import instances
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.support.strategies import GIB, MIXTURE, SMALL, dpo, graphs, placed, plans, ppo

EIGHT = ClusterShape("eight", 1, 8, 80 * GIB)
WORK = Workload.fixed(8, 8)


def beside(plan, graph):
    """Bytes on the first device, by what they are."""
    found = overhead(graph, plan, "cuda")
    first = min(found)
    return {(share.owner, share.what): share.num_bytes for share in found[first]}


def of_shape(graph, shape):
    return replace(graph, models=tuple(replace(one, shape=shape) for one in graph.models))


def eight(graph, **placements):
    """Flattening on eight devices, where DPO trains and infers in the same layout."""
    plan = preset("flattening", graph, EIGHT, EIGHT.whole)
    for call, fields in placements.items():
        plan = placed(plan, call, **fields)
    return plan


@pytest.mark.parametrize(
    ("strategy", "groups"),
    [
        ({"dp": 8, "tp": 1, "pp": 1}, [8]),  # its replicas are the mesh
        ({"dp": 2, "tp": 4, "pp": 1}, [4, 2, 8]),
        ({"dp": 2, "tp": 2, "pp": 2}, [2, 2, 2, 8]),
    ],
)
def test_a_trained_model_has_a_communicator_for_each_different_group(strategy, groups):
    """Layers, stages, replicas and the whole mesh; a model that only infers in the same layout has no others.

    All ranks together have one from their start.
    """
    graph = dpo()
    graph = replace(
        graph, models=tuple(replace(one, shape=replace(one.shape, tied_embeddings=False)) for one in graph.models)
    )
    names = [call.name for call in graph if call.role is not None]
    plan = eight(graph, **dict.fromkeys(names, strategy))
    found = beside(plan, graph)
    groups = [*groups, 8]
    assert found == {("device", f"{len(groups)} NCCL communicators"): sum(map(communicator_bytes, groups))}


def test_vllm_has_its_own_graphs_and_groups_and_moves_use_all_devices():
    graph = ppo()
    found = beside(eight(graph), graph)
    (graphs_of,) = [owner for owner, what in found if what == "CUDA graphs"]
    assert graphs_of.startswith("actor.vllm")
    (groups,) = [what for owner, what in found if owner == "device"]
    assert int(groups.split()[0]) >= 2


def test_experts_have_groups_of_their_own():
    """dp 8 in twos: pairs that share experts out, four replicas that hold the same, and all."""
    graph = of_shape(dpo(), MIXTURE)
    strategy = {"dp": 8, "tp": 1, "pp": 1, "ep": 2}
    found = beside(eight(graph, **dict.fromkeys(["actor_train_step", "ref_inference"], strategy)), graph)
    assert found == {("device", "4 NCCL communicators"): sum(map(communicator_bytes, [2, 4, 8, 8]))}


@given(st.data(), st.booleans())
def test_a_call_alone_never_brings_more_than_its_plan_has(data, mixture):
    """The search may count it as a lower bound."""
    graph = of_shape(data.draw(graphs()), MIXTURE if mixture else SMALL)
    plan = data.draw(plans(graph, EIGHT))
    held = overhead(graph, plan, "cuda")
    for call in graph:
        if call.role is None:
            continue
        least = sum(call_overhead(call, plan[call.name], graph.model(call.role), "cuda"))
        for device in plan[call.name].mesh.devices():
            assert least <= sum(share.num_bytes for share in held.get(device, ()))
    assert overhead(graph, plan, "cpu") == {}


def test_every_term_is_in_the_table_and_counts():
    graph = ppo()
    plan = eight(graph)
    cuda, cpu = (certify_plan(plan, graph, WORK, backend) for backend in ("cuda", "cpu"))
    for term in ("CUDA context", "fragments", "NCCL communicators", "CUDA graphs"):
        assert term in cuda.table()
        assert (term in cpu.table()) is (term == "fragments")
    fullest = cuda.fullest
    assert fullest.num_bytes == sum(share.num_bytes for share in fullest.shares)
    assert fullest.device_bytes == 80 * GIB
    assert dict(cuda.most_resident)["n0:0"] < fullest.num_bytes
    assert len(instances(graph, plan)) > 1


@given(st.integers(1, 200 * GIB), st.sampled_from(["cuda", "cpu"]))
def test_the_suggested_memory_suffices(filled, backend):
    enough = enough_bytes(filled, backend)
    assert usable_bytes(enough, backend) >= filled > usable_bytes(enough - 2 * GIB, backend)


def test_torch_may_reserve_all_but_the_context_and_the_communicators():
    graph = ppo()
    plan = eight(graph)
    (groups,) = [num for (owner, _), num in beside(plan, graph).items() if owner == DEVICE]
    limits = torch_limits(graph, plan, "cuda")
    assert set(limits) == set(EIGHT.whole.devices())
    assert limits[EIGHT.whole.devices()[0]] == 80 * GIB - CONTEXT_BYTES - groups
    assert torch_limits(graph, plan, "cpu") == {}


def test_torch_has_no_limit_next_to_a_sleeping_engine():
    """Torch counts its unmapped memory as its own."""
    graph = ppo()
    asleep = placed(eight(graph), "actor_generate", offload="all")
    assert torch_limits(graph, asleep, "cuda") == {}
    assert torch_limits(graph, placed(eight(graph), "ref_inference", offload="all"), "cuda") != {}
