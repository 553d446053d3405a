"""A plan's host memory: offloaded parts and a checkpoint's copies need pinned memory on a node's host."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.augmented.work import Reload
from prefect_rlhf.placement.cost.sizes import ModelSizes, instance_copied_bytes
from prefect_rlhf.placement.memory.alike import Ints, Spread, summed
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.holdings import Kept, moves_with
from prefect_rlhf.placement.plan import ModelInstance, stored_instance

COPIED = frozenset({"weights", "adapter", "main weights", "optimizer"})
"""Offloaded kinds. Gradients come back as zeros; a key-value cache and packed weights are made again."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The bytes that a node's host keeps for its devices; `checkpoint_bytes` of them are for a checkpoint.

    `host_bytes` is the host memory available for that, 0 if unknown.
    """

    node: int
    num_bytes: int
    host_bytes: int
    checkpoint_bytes: int = 0

    @property
    def excess_bytes(self) -> int:
        """The bytes that exceed the host's memory."""
        return max(0, self.num_bytes - self.host_bytes) if self.host_bytes else 0

    def __str__(self) -> str:
        room = f" of the {byte_size(self.host_bytes)} it has for that" if self.host_bytes else ""
        checkpoint = f", {byte_size(self.checkpoint_bytes)} of it for a checkpoint" if self.checkpoint_bytes else ""
        return f"the host of n{self.node} keeps {byte_size(self.num_bytes)}{room}{checkpoint}"


def host_loads(
    augmented: AugmentedGraph, held: Mapping[ModelInstance, Spread[Kept]], *, has_checkpoints: bool
) -> tuple[HostLoad, ...]:
    """Count the bytes that each host keeps, given the bytes `held` on a graph's devices; empty hosts are left out.

    Each rank has a pinned buffer for its offloaded parts, from its first offload to the end of the run. A part that is
    always overwritten after its reload needs no buffer. Checkpoints have a buffer too: a single copy of the main
    weights and moments that a rank writes.
    """
    reloads = (node.work for node in augmented if isinstance(node.work, Reload) and node.work.copies)
    parts, plan = dict.fromkeys((reload.instance, reload.part) for reload in reloads), augmented.plan
    num_nodes, per_node = plan.cluster.num_nodes, plan.cluster.devices_per_node
    kept = np.zeros(num_nodes, dtype=np.int64)
    for instance, part in parts:
        spread = held[instance]
        sizes = [sum(n for what, n in each if what in COPIED and moves_with(what, part)) for each in spread.values]
        kept += summed(spread.numbers // per_node, np.array(sizes, dtype=np.int64)[spread.kinds], num_nodes)
    copied = np.zeros(num_nodes, dtype=np.int64)
    for model in augmented.graph.models if has_checkpoints else ():
        trained = stored_instance(augmented.graph, plan, model.role)
        if trained is not None:
            copied += _copied_by_node(trained, ModelSizes.of(model), num_nodes)
    room = plan.cluster.host_memory_bytes
    by_node = enumerate(zip(kept.tolist(), copied.tolist(), strict=True))
    return tuple(
        HostLoad(node, offloaded + copy, room, copy) for node, (offloaded, copy) in by_node if offloaded or copy
    )


@lru_cache(maxsize=256)  # most of the plans that a question compares have the same
def _copied_by_node(trained: ModelInstance, sizes: ModelSizes, num_nodes: int) -> Ints:
    by_device = instance_copied_bytes(trained, sizes)
    return summed(np.array([device.node for device in by_device]), list(by_device.values()), num_nodes)


def fullest_host(loads: Iterable[HostLoad]) -> HostLoad | None:
    """Return the host that keeps most (the first of equal hosts); None if all are empty."""
    return max(loads, key=lambda load: load.num_bytes, default=None)
