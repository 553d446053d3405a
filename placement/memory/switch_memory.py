"""Host memory during a switch between plans: the training states that leave their devices wait there."""

from collections import Counter

from prefect_rlhf.placement.cost.sizes import ModelSizes, instance_copied_bytes
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.placement.memory.hosts import HostLoad
from prefect_rlhf.placement.plan import ExecutionPlan, stored_instance
from prefect_rlhf.placement.plans.switch import moving_roles


def switch_loads(
    graph: DataflowGraph, plan: ExecutionPlan, other: ExecutionPlan, certificates: tuple[Certificate, Certificate]
) -> tuple[HostLoad, ...]:
    """Return the bytes that each host keeps while a run switches from `plan` to `other`.

    These are copies of the states that move, and the parts that either plan offloads (from its certificate). A
    checkpoint of `plan` uses the same copies, and counts only if it is larger.
    """
    before, _ = certificates
    copies, offloaded = Counter[int](), Counter[int]()
    for role in moving_roles(graph, plan, other):
        instance = stored_instance(graph, plan, role)
        assert instance is not None  # no frozen role moves
        for device, num_bytes in instance_copied_bytes(instance, ModelSizes.of(graph.model(role))).items():
            copies[device.node] += num_bytes
    for certificate in certificates:
        offloaded |= Counter({host.node: host.num_bytes - host.checkpoint_bytes for host in certificate.hosts})
    copies |= Counter({host.node: host.checkpoint_bytes for host in before.hosts})
    kept, room = copies + offloaded, plan.cluster.host_memory_bytes
    return tuple(HostLoad(node, kept[node], room) for node in sorted(kept))
