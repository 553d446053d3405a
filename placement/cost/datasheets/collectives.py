"""How long collectives over a group of devices take: rings, and the all-to-all of experts.

A ring over n devices sends (n - 1) / n of the data over every link for a reduce-scatter or an all-gather, and twice
that for an all-reduce (Patarasuk and Yuan 2009; Thakur et al. 2005). If a group spans nodes, its members on a node
share their network links, so the ring is as fast as these links together, and never faster than the links within the
node.
"""

from dataclasses import dataclass
from math import ceil, log2

from prefect_rlhf.placement.cost.datasheets.hardware import Links, LinkSpan
from prefect_rlhf.placement.models.engine_constants import GRADIENT_BYTES


@dataclass(frozen=True, slots=True)
class CollectiveGroup:
    """`size` devices that work on a collective; `per_node` of them share a node, and so share its link to other
    nodes.
    """

    size: int
    span: LinkSpan
    per_node: int


def all_reduce_seconds(num_bytes: float, group: CollectiveGroup, links: Links) -> float:
    """Return the seconds until every device has the sum of `num_bytes` of each.

    >>> all_reduce_seconds(1e9, CollectiveGroup(2, "node", 2), Links(2e12, 1e11, 1e10, 2e10))
    0.01
    """
    return 2 * _ring_seconds(num_bytes, group, links) + _latency_seconds(group, links)


def share_seconds(num_bytes: float, group: CollectiveGroup, links: Links) -> float:
    """Return how long a reduce-scatter or an all-gather of `num_bytes` takes, in seconds."""
    return _ring_seconds(num_bytes, group, links) + _latency_seconds(group, links)


def replicas_seconds(num_parameters: float, item_bytes: int, group: CollectiveGroup, links: Links) -> float:
    """Return the seconds to sum gradients, each replica a share, and to give every replica the new weights (ZeRO 1)."""
    gradients = share_seconds(num_parameters * GRADIENT_BYTES, group, links)
    return gradients + share_seconds(num_parameters * item_bytes, group, links)


def all_to_all_seconds(num_bytes: float, group: CollectiveGroup, links: Links) -> float:
    """Return the seconds until every device has sent `num_bytes`, in equal parts, to all devices of the group and
    itself.

    Every device has its own share of the network and uses both kinds of links at once, so the busier kind counts.

    >>> all_to_all_seconds(1e9, CollectiveGroup(4, "network", 2), Links(2e12, 1e11, 1e10, 2e10))
    0.05
    """
    if group.size == 1:
        return 0.0
    near = group.size if group.span == "node" else group.per_node
    far_bytes = num_bytes * (group.size - near) / group.size
    near_bytes = num_bytes * (near - 1) / group.size
    return max(links.seconds(near_bytes, "node"), links.seconds(far_bytes, "network"))


def _ring_seconds(num_bytes: float, group: CollectiveGroup, links: Links) -> float:
    if group.size == 1:
        return 0.0
    bandwidth = links.node if group.span == "node" else min(links.of("network") * group.per_node, links.node)
    return (group.size - 1) / group.size * num_bytes / bandwidth


def _latency_seconds(group: CollectiveGroup, links: Links) -> float:
    """Return the latency of a tree that reduces small messages, first on each node."""
    levels = ceil(log2(group.size))
    if group.span == "node":
        return levels * links.latency_seconds
    within = min(levels, ceil(log2(group.per_node)))
    return within * links.latency_seconds + (levels - within) * links.latency("network")
