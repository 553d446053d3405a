"""The smallest cluster on which an algorithm fits at all: APP's check before it plans (its MinResourceChecker).

Xiao et al. 2023 (arXiv:2312.11819), section V-C, step 1. Here it is the planner itself, certificate included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.planner.question import Question, Site


@dataclass(frozen=True, slots=True)
class Smallest:
    """The first size that fits, its plan, and the refusal of the largest smaller size that was tried, if any."""

    size: Site
    planned: Planned
    refused: str


def sizes_of(hardware: Hardware, most_nodes: int) -> tuple[Site, ...]:
    """Return a node with 1, 2, 4, ... of its devices, then whole nodes.

    >>> from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
    >>> [size.cluster.name for size in sizes_of(Hardware(DATASHEETS["a100-80"], 8), 3)]
    ['1x1', '1x2', '1x4', '1x8', '2x8', '3x8']
    """
    if most_nodes < 1:
        raise InvalidInput("most_nodes", most_nodes, "at least 1 node")
    widths = [1 << bit for bit in range(hardware.devices_per_node.bit_length()) if 1 << bit < hardware.devices_per_node]
    shapes = [(1, width) for width in widths]
    shapes += [(nodes, hardware.devices_per_node) for nodes in range(1, most_nodes + 1)]
    sites = []
    for nodes, width in shapes:
        cluster = ClusterShape(f"{nodes}x{width}", nodes, width, hardware.device.memory_bytes)
        sources = CostSources.equal_nodes(replace(hardware, devices_per_node=width), nodes)
        sites.append(Site(cluster, cluster.whole, sources))
    return tuple(sites)


def smallest_that_fits(
    graph: DataflowGraph, sizes: Sequence[Site], workload: Workload, budget_seconds: float = 3.0
) -> Smallest:
    """Find the first of `sizes` that has a plan that fits; each size must contain the previous size.

    The search is binary. If no size fits, raises InvalidInput with the missing memory of the largest.
    """
    if not sizes:
        raise InvalidInput("sizes", list(sizes), "at least one cluster to try")
    best, refused = plan_graph(Question(graph, sizes[-1], workload), budget_seconds), ""
    low, high = 0, len(sizes) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            best, high = plan_graph(Question(graph, sizes[middle], workload), budget_seconds), middle
        except InvalidInput as error:
            low, refused = middle + 1, f"{sizes[middle].cluster.name}: {str(error).splitlines()[0]}"
    return Smallest(sizes[low], best, refused)
