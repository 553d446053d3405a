"""Shrinks a lease to its living nodes, for runs that accept fewer devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.devices.mesh import DeviceMesh

if TYPE_CHECKING:
    from prefect_rlhf.tasks.ray_nodes import KnownNode


def on_living_nodes(leased: Lease, say: Callable[[str], object]) -> Lease:
    """Return the lease, or its largest part whose nodes the Ray cluster still has, and report that part to `say`.

    The part has at least `min_devices`. If no part has enough, the lease is unchanged and the gang reports the missing
    nodes. Raises InvalidInput if Ray does not respond.
    """
    whole, least = leased.mesh, leased.min_devices
    if not least or whole.num_nodes == 1 or not leased.devices:
        return leased
    from prefect_rlhf.tasks.ray_nodes import known_nodes  # needs the engines, which a dry run may lack

    nodes = known_nodes()
    for mesh in _parts(whole):
        part = replace(leased, mesh=mesh, devices=mesh.devices())
        if mesh.num_devices >= least and _are_there(part, nodes):
            if part != leased:
                gone = f"the Ray cluster lacks nodes of {whole.name}"
                say(f"{gone}: continuing on {mesh.name} (min_devices: {least})")
            return part
    return leased


def _parts(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield the contiguous parts of a mesh that consist of whole nodes, largest first."""
    for count in range(mesh.num_nodes, 0, -1):
        for first in range(mesh.num_nodes - count + 1):
            yield replace(mesh, first_node=mesh.first_node + first, num_nodes=count)


def _are_there(leased: Lease, nodes: tuple[KnownNode, ...]) -> bool:
    """Whether Ray still reports enough nodes of each leased kind. Ray itself tracks their reservations."""
    living = [node for node in nodes if node.alive]
    enough = [node for node in living if node.has(leased.kind) >= leased.mesh.devices_per_node]
    if not leased.node_devices:
        return len(enough) >= leased.mesh.num_nodes
    return Counter(leased.node_devices) <= Counter(node.device for node in enough)
