"""Reads clusters from text such as `16x8:h100`: shape, each node's hardware, network and profiles."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.hardware.node_hardware import NETWORK, ORCHESTRATION_SECONDS, node_hardware
from prefect_rlhf.placement.cost.datasheets.hardware import GIB, NETWORKS, Datasheet, Network, relative_speeds
from prefect_rlhf.placement.cost.datasheets.kinds import datasheet, usual_host_bytes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES, MOST_NODES, Backend, ClusterShape
from prefect_rlhf.placement.memory.room import with_room
from prefect_rlhf.placement.planner.question import Site

_GROUP = re.compile(r"([0-9]{1,9})x([0-9]{1,9}):([\w. -]+)")
_KIND = re.compile(r"[\w. -]+")
NODE = 8  # devices of a node whose kind alone is named
CLUSTER_FORM = "nodes x devices : kind, such as 16x8:h100, or 1x8:a100-40+1x8:v100-32 for nodes of two kinds"
SINGLE_KIND = "a cluster with a single kind of node, such as 4x8:h100"
CPU_MEMORY_BYTES = 8 * GIB  # of a rank without a GPU: the default of a Cluster block


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """`num_nodes` equal nodes. `device` names a datasheet or the `described` device, or is `cpu`."""

    num_nodes: int
    devices_per_node: int
    device: str
    described: Datasheet | None = None

    @property
    def memory_bytes(self) -> int:
        """A device's memory, from its datasheet."""
        return CPU_MEMORY_BYTES if self.device == "cpu" else self.sheet.memory_bytes

    @property
    def sheet(self) -> Datasheet:
        """The datasheet of a device that is not a CPU."""
        return self.described or datasheet(self.device)


Groups = tuple[NodeGroup, ...]


def parse_cluster(text: str, described: Datasheet | None = None) -> tuple[NodeGroup, ...]:
    """Parse a cluster into groups of equal nodes, in order; a kind may be the device `described` by hand.

    Raises InvalidInput for an invalid cluster, and for a described device that no node has.

    >>> [group.device for group in parse_cluster("1x8:a100-40+1x8:v100-32")]
    ['a100-40', 'v100-32']
    """
    groups = tuple(_group(part, text, described) for part in text.split("+"))
    _check_described_is_used(groups, text, described)
    return groups


def parse_clusters(text: str, num_nodes: Sequence[int] = (), described: Datasheet | None = None) -> tuple[Groups, ...]:
    """Parse a list of clusters. Each comes in the sizes `num_nodes` and in its own, in ascending order.

    A kind without a size, such as `h100`, stands for nodes of eight devices; it has the sizes `num_nodes` alone. Raises
    InvalidInput for an invalid cluster, for a described device that no node has, for a kind without a size if
    `num_nodes` is empty, and for nodes of several kinds if it is not.

    >>> [groups[0].num_nodes for groups in parse_clusters("h100,1x4:l40s", [2, 4])]
    [2, 4, 1, 2, 4]
    """
    clusters: list[Groups] = []
    for part in text.split(","):
        is_kind = bool(num_nodes) and _KIND.fullmatch(part.strip()) is not None
        groups = tuple(_group(f"1x{NODE}:{part}" if is_kind else each, text, described) for each in part.split("+"))
        if num_nodes and len(groups) > 1:
            raise InvalidInput("sweep", part, SINGLE_KIND)
        sizes = {*num_nodes, *([] if is_kind else [groups[0].num_nodes])}
        clusters += [(replace(groups[0], num_nodes=nodes), *groups[1:]) for nodes in sorted(sizes)]
    _check_described_is_used([group for groups in clusters for group in groups], text, described)
    return tuple(dict.fromkeys(clusters))


def _group(text: str, cluster: str, described: Datasheet | None) -> NodeGroup:
    match = _GROUP.fullmatch(text.strip())
    if match is None:
        raise InvalidInput("cluster", cluster, CLUSTER_FORM)
    nodes, devices, name = int(match[1]), int(match[2]), match[3].strip().lower()
    if not (1 <= nodes <= MOST_NODES and 1 <= devices <= MOST_DEVICES):
        raise InvalidInput("cluster", cluster, f"1 to {MOST_NODES} nodes with 1 to {MOST_DEVICES} devices each")
    if described is not None and name == described.name:
        return NodeGroup(nodes, devices, name, described)
    try:
        return NodeGroup(nodes, devices, datasheet(name, "cluster").name)
    except InvalidInput as error:
        raise InvalidInput("cluster", name, f"{error.expected}; --device describes any other kind") from None


def _usual_host_bytes(group: NodeGroup) -> int:
    return 0 if group.device == "cpu" else usual_host_bytes(group.sheet, group.devices_per_node)


def _check_described_is_used(groups: Sequence[NodeGroup], text: str, described: Datasheet | None) -> None:
    """Raise InvalidInput if there is a described device and no node has it."""
    if described is not None and all(group.described is None for group in groups):
        raise InvalidInput("cluster", text, f"nodes of the described device, such as 1x8:{described.name}")


def site_of(
    groups: Sequence[NodeGroup],
    network: str = "",
    memory_gib: float | None = None,
    call_seconds: float | None = None,
    host_memory_gib: float | None = None,
    headroom: float | None = 0.0,
) -> Site:
    """Return the site that `groups` describe.

    `memory_gib` is every device's memory, by default its datasheet's. `call_seconds` is the host overhead of a call,
    apart from its layers; by default, the estimate for our runtime. `host_memory_gib` is the memory of each node's host
    for offloading and checkpoints; by default, that of `usual_host_bytes`. `headroom` is the share of each device's
    memory that plans must leave free; None keeps the usual share.

    Raises InvalidInput for a cluster that no plan could span, and for a headroom that leaves nothing.
    """
    widths = sorted({group.devices_per_node for group in groups})
    if len(widths) > 1:
        raise InvalidInput(
            "cluster", f"nodes of {' and '.join(map(str, widths))} devices", "the same number in every node"
        )
    kinds = {"cpu" if group.device == "cpu" else "cuda" for group in groups}
    if len(kinds) > 1:
        raise InvalidInput("cluster", "cpu and GPUs", "only GPUs, or only CPUs")
    between = parse_network(network) if sum(group.num_nodes for group in groups) > 1 else None
    nodes = [group for group in groups for _ in range(group.num_nodes)]
    memory = [int(memory_gib * GIB) if memory_gib else group.memory_bytes for group in nodes]
    host_bytes = int(host_memory_gib * GIB) if host_memory_gib else min(map(_usual_host_bytes, nodes))
    shape = ClusterShape("what-if", len(nodes), widths[0], min(memory), host_memory_bytes=host_bytes)
    if len(set(memory)) > 1:
        shape = shape.with_memory(memory)
    hardware = tuple(
        node_hardware(group.device if group.device == "cpu" else group.sheet, group.devices_per_node, between)
        for group in nodes
    )
    if call_seconds is not None:
        hardware = tuple(
            replace(node, efficiency=replace(node.efficiency, call_seconds=call_seconds)) for node in hardware
        )
    shape = shape.with_speeds(relative_speeds(hardware))
    sources = CostSources(hardware, orchestration_seconds=ORCHESTRATION_SECONDS)
    backend: Backend = "cpu" if kinds == {"cpu"} else "cuda"
    return Site(with_room(shape, headroom, backend), shape.whole, sources, backend)


def parse_network(text: str) -> Network:
    """Return a network by its name, or by Gbit/s per node and direction; empty text is the default network.

    >>> parse_network("400").node_bytes_per_second
    50000000000.0
    """
    if not text:
        return NETWORK
    if text in NETWORKS:
        return NETWORKS[text]
    try:
        gigabits = float(text)
    except ValueError:
        gigabits = 0.0
    if not 0 < gigabits < float("inf"):
        raise InvalidInput("network", text, f"Gbit/s per node, or one of {', '.join(NETWORKS)}")
    return Network(f"{text} Gbit/s", gigabits * 1e9 / 8)
