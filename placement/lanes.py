"""Devices next to each other that are alike, as rectangles: the lanes of a picture, the rows of a table."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace

from prefect_rlhf.placement.mesh import Device, DeviceMesh


def lanes(values: Mapping[Device, Hashable]) -> list[DeviceMesh]:
    """Runs of devices of one node that have one value, together with those of the next nodes that have it too.

    >>> values = {Device(node, index): "busy" for node in range(2) for index in range(4)} | {Device(2, 0): "idle"}
    >>> [lane.name for lane in lanes(values)]
    ['n0-1:0-3', 'n2:0']
    """
    found: list[DeviceMesh] = []
    for lane in _in_nodes(values):
        if found and _follows(found[-1], lane) and values[found[-1].devices()[0]] == values[lane.devices()[0]]:
            found[-1] = replace(found[-1], num_nodes=found[-1].num_nodes + 1)
        else:
            found.append(lane)
    return found


def _follows(before: DeviceMesh, lane: DeviceMesh) -> bool:
    """Whether it is the same devices of the next node."""
    return replace(before, first_node=lane.first_node, num_nodes=1) == lane and (
        before.first_node + before.num_nodes == lane.first_node
    )


def _in_nodes(values: Mapping[Device, Hashable]) -> Iterator[DeviceMesh]:
    """Runs of devices, each within one node."""
    run: list[Device] = []
    for device in sorted(values):
        if run and (device, values[device]) != (Device(run[-1].node, run[-1].index + 1), values[run[-1]]):
            yield _lane(run)
            run = []
        run.append(device)
    if run:
        yield _lane(run)


def _lane(run: list[Device]) -> DeviceMesh:
    return DeviceMesh(run[0].node, 1, run[0].index, len(run))
