"""The log line on the kernels of attention that a run takes on GPUs."""

from collections.abc import Sequence

from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.attention_kernel import AttentionKernel, attention_kernel
from prefect_rlhf.placement.plan import ExecutionPlan, instances

ADDITIONS = {
    "flash attention": "",
    "memory-efficient attention": "",
    "scores of all pairs of tokens": ", which the certificate of memory does not count",
}


def attention_lines(graph: DataflowGraph, plans: Sequence[ExecutionPlan]) -> list[str]:
    """Return a line for each attention kernel with the roles that use it, for engines whose kernels torch chooses."""
    roles: dict[AttentionKernel, list[str]] = {}
    for plan in plans:
        for instance in instances(graph, plan):
            if TRAITS[instance.engine].attends_by_torch:
                spec = graph.model(instance.role)
                found = roles.setdefault(attention_kernel(spec.shape, spec.dtype), [])
                found += [instance.role] if instance.role not in found else []
    return [f"attention of {', '.join(of)}: {kernel}{ADDITIONS[kernel]}" for kernel, of in roles.items()]
