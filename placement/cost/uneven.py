"""Calls on meshes with different nodes: each replica gets rows according to its speed, and the last to finish counts.

Replicas get rows in proportion to their speeds (RowPartition), a replica is as fast as its slowest device, and traffic
between nodes uses the slower network. APP (section VI-B1) balances kinds of devices by their batch sizes in the same
way.
"""

from collections.abc import Sequence
from dataclasses import replace

from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.plan import Placement, device_coordinates
from prefect_rlhf.placement.rows.partition import counts
from prefect_rlhf.placement.rows.shares import replica_speeds


def replica_works(work: CallWork, placement: Placement, node_speeds: Sequence[float]) -> tuple[CallWork, ...]:
    """Return the call as each replica sees it, with its rows dealt by count; see `works_of_rows`."""
    return works_of_rows(work, _dealt(work, placement, node_speeds), placement.strategy.ep)


def works_of_rows(work: CallWork, dealt: Sequence[Sequence[int]], ep: int) -> tuple[CallWork, ...]:
    """Return each replica's work, as if every replica had as many rows as this one.

    `dealt` says, for each row set, how many rows of a mini-batch each replica has. Replicas that share experts serve
    each other's rows, so each counts as the fullest of them.
    """
    counted, works = _works_by_rows(work, dealt)
    fullest = [max(counted[first : first + ep]) for first in range(0, len(counted), ep)]
    return tuple(works[fullest[replica // ep]] for replica in range(len(counted)))


def different_works(work: CallWork, placement: Placement, node_speeds: Sequence[float]) -> tuple[CallWork, ...]:
    """Return the distinct works among all replicas, given their own rows."""
    return tuple(_works_by_rows(work, _dealt(work, placement, node_speeds))[1].values())


def placed_cost(
    work: CallWork, sizes: ModelSizes, placement: Placement, sources: CostSources, node_speeds: Sequence[float] = ()
) -> Seconds:
    """Return a call's time in seconds, as placed, until its last replica ends."""
    if _alike(placement, node_speeds):
        return sources.call_cost(work, Execution.of(placement), sizes, placement.mesh)
    return _last_cost(replica_works(work, placement, node_speeds), sizes, placement, sources)


def least_cost(
    work: CallWork, sizes: ModelSizes, placement: Placement, sources: CostSources, node_speeds: Sequence[float] = ()
) -> Seconds:
    """Return the call's shortest time on the mesh under any device order; the placement states no order.

    Either as many replicas as possible have only the fastest devices, or every replica has a slowest device and all
    have equally many rows. Shared experts are counted for each replica's own rows.
    """
    together = sources.call_cost(work, Execution.of(placement), sizes, placement.mesh)
    if _alike(placement, node_speeds):
        return together
    fastest_first = replace(placement, device_order=_fastest_first(placement, node_speeds))
    counted, works = _works_by_rows(work, _dealt(work, fastest_first, node_speeds))
    apart = _last_cost([works[count] for count in counted], sizes, fastest_first, sources)
    return min(apart, together, key=lambda cost: cost.total)


def _alike(placement: Placement, node_speeds: Sequence[float]) -> bool:
    """Whether the nodes of a mesh are equally fast."""
    mesh = placement.mesh
    return len(set(node_speeds[mesh.first_node : mesh.first_node + mesh.num_nodes])) <= 1


def _last_cost(works: Sequence[CallWork], sizes: ModelSizes, placement: Placement, sources: CostSources) -> Seconds:
    """Return the time of the replica that ends last, in seconds; each has its own work and its slowest device."""
    nodes, first = sources.hardware(placement.mesh), placement.mesh.first_node
    shares = {(works[at.dp], nodes[device.node - first]): None for device, at in device_coordinates(placement)}
    return sources.slowest(shares, Execution.of(placement), sizes)


def _fastest_first(placement: Placement, node_speeds: Sequence[float]) -> tuple[int, ...]:
    """Return the order that gives replica 0 the fastest devices, replica 1 the next fastest, and so on."""
    if not node_speeds:
        return ()
    coordinates, devices = placement.strategy.coordinates(), placement.mesh.devices()
    by_speed = sorted(range(len(devices)), key=lambda position: -node_speeds[devices[position].node])
    ranks = sorted(range(len(devices)), key=lambda rank: coordinates[rank].dp)
    return tuple(position for _, position in sorted(zip(ranks, by_speed, strict=True)))


def _dealt(work: CallWork, placement: Placement, node_speeds: Sequence[float]) -> list[list[int]]:
    """Deal the rows of a mini-batch of every row set to the replicas, by count."""
    speeds = replica_speeds(placement, node_speeds)
    return [
        [count * part.rows_per_item for count in counts(part.mini_batch_rows(1) // part.rows_per_item, speeds)]
        for part in (work, *work.others)
    ]


def _works_by_rows(
    work: CallWork, dealt: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[int, ...], ...], dict[tuple[int, ...], CallWork]]:
    """Return each replica's rows of a mini-batch, of every row set, and the work of a replica with these rows."""
    parts = (replace(work, others=()), *work.others)
    rows = tuple(zip(*dealt, strict=True))

    def seen(of_replica: tuple[int, ...]) -> CallWork:
        first, *others = (
            replace(part, rows=count * part.mini_batches * len(rows))
            for part, count in zip(parts, of_replica, strict=True)
        )
        return replace(first, others=tuple(others)) if others else first

    return rows, {of_replica: seen(of_replica) for of_replica in dict.fromkeys(rows)}
