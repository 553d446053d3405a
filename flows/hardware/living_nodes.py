"""The part of a lease whose nodes are there, on which a run goes on that may make do with fewer devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_rlhf.placement.lease import Lease
from prefect_rlhf.placement.mesh import DeviceMesh

if TYPE_CHECKING:
    from prefect_rlhf.tasks.nodes import KnownNode


def on_living_nodes(leased: Lease, say: Callable[[str], object]) -> Lease:
    """Return the lease, or its largest part whose nodes the Ray cluster still has, and tell `say` of it.

    The part has `min_devices` or more; where there is none, the lease stays as it is and the gang says what is missing.
    Raises InvalidInput where Ray does not answer.
    """
    whole, least = leased.mesh, leased.min_devices
    if not least or whole.num_nodes == 1 or not leased.devices:
        return leased
    from prefect_rlhf.tasks.nodes import known_nodes  # needs the engines, which a dry run does without

    nodes = known_nodes()
    for mesh in _parts(whole):
        part = replace(leased, mesh=mesh, devices=mesh.devices())
        if mesh.num_devices >= least and _are_there(part, nodes):
            if part != leased:
                gone = f"of the nodes of {whole.name} the Ray cluster has too few"
                say(f"{gone}: going on with {mesh.name} (min_devices: {least})")
            return part
    return leased


def _parts(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield the whole nodes of a mesh that follow each other, most of them first."""
    for count in range(mesh.num_nodes, 0, -1):
        for first in range(mesh.num_nodes - count + 1):
            yield replace(mesh, first_node=mesh.first_node + first, num_nodes=count)


def _are_there(leased: Lease, nodes: tuple[KnownNode, ...]) -> bool:
    """Whether there are as many nodes of each kind as the lease has, with devices enough; who holds them, Ray knows."""
    living = [node for node in nodes if node.alive]
    enough = [node for node in living if node.has(leased.kind) >= leased.mesh.devices_per_node]
    if not leased.node_devices:
        return len(enough) >= leased.mesh.num_nodes
    return Counter(leased.node_devices) <= Counter(node.device for node in enough)
