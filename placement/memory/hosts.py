"""Host memory of a plan: offloaded parts and a checkpoint's copies need room in the memory of a node's host, pinned."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.work import Reload
from prefect_rlhf.placement.cost.sizes import copied_bytes
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.holdings import ResidentBytes

COPIED = frozenset({"weights", "optimizer"})
"""What goes to the host: gradients come back as zeros, a key-value cache and packed weights are made again."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The bytes that a node's host keeps for its devices, `checkpoint_bytes` of them for a checkpoint.

    `host_bytes` is its memory for that, 0 if unknown.
    """

    node: int
    num_bytes: int
    host_bytes: int
    checkpoint_bytes: int = 0

    @property
    def excess_bytes(self) -> int:
        """Bytes that the host has no room for."""
        return max(0, self.num_bytes - self.host_bytes) if self.host_bytes else 0

    def __str__(self) -> str:
        room = f" of the {byte_size(self.host_bytes)} it has for that" if self.host_bytes else ""
        checkpoint = f", {byte_size(self.checkpoint_bytes)} of it for a checkpoint" if self.checkpoint_bytes else ""
        return f"the host of n{self.node} keeps {byte_size(self.num_bytes)}{room}{checkpoint}"


def host_loads(
    augmented: AugmentedGraph, held: Mapping[Device, Sequence[ResidentBytes]], *, has_checkpoints: bool
) -> tuple[HostLoad, ...]:
    """Count the bytes that each host keeps for a graph whose devices hold `held`; an empty host is left out.

    Each rank has a pinned buffer for its offloaded parts, from its first offload to the end of the run. A part that is
    always overwritten after its reload needs no buffer. Checkpoints have a buffer too: a single copy of the main
    weights and moments that a rank writes.
    """
    reloads = (node.work for node in augmented if isinstance(node.work, Reload) and node.work.copies)
    parts, plan, kept = {reload.instance: reload.part for reload in reloads}, augmented.plan, Counter[int]()
    for device, of_device in held.items() if parts else ():
        for one in of_device:
            part = parts.get(one.instance) if one.what in COPIED else None
            if part is not None and one.moves_with(part):
                kept[device.node] += one.num_bytes
    copied = Counter[int]()
    for device, num_bytes in copied_bytes(augmented.graph, plan).items() if has_checkpoints else ():
        copied[device.node] += num_bytes
    room = plan.cluster.host_memory_bytes
    return tuple(HostLoad(node, kept[node] + copied[node], room, copied[node]) for node in sorted({*kept, *copied}))


def fullest_host(loads: Iterable[HostLoad]) -> HostLoad | None:
    """Return the host that keeps most, the first of equal hosts; None if all are empty."""
    return max(loads, key=lambda load: load.num_bytes, default=None)
