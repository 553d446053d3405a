"""What a plan would do and when, as a picture: devices next to each other that do the same share a lane."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_rlhf.placement.estimate import Estimate
from prefect_rlhf.placement.mesh import Device, DeviceMesh
from prefect_rlhf.placement.schedule import Slot
from prefect_rlhf.placement.timeline import Bar, timeline_svg

STEPS_SHOWN = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """Devices that do the same; `shown` are the numbers of the slots that they take part in."""

    mesh: DeviceMesh
    shown: tuple[int, ...]


def plan_svg(estimate: Estimate, num_steps: int = STEPS_SHOWN) -> str:
    """The first of the steps that are alike, as SVG. Nodes that take no time are left out."""
    steps = range(estimate.first_step, estimate.first_step + num_steps)
    slots = [slot for slot in estimate.schedule.slots if slot.node.step in steps and slot.seconds > 0]
    lanes_of: dict[int, list[str]] = defaultdict(list)
    for lane in lanes(slots, estimate.plan.cluster.devices_per_node):
        for index in lane.shown:
            lanes_of[index].append(lane.mesh.name)
    return timeline_svg(
        [Bar(slot.node.title, slot.node.kind, tuple(lanes_of[i]), slot.start, slot.end) for i, slot in enumerate(slots)]
    )


def lanes(slots: Sequence[Slot], devices_per_node: int) -> list[Lane]:
    """Runs of devices of one node that take part in the same slots; whole nodes in a row that do, together."""
    shown: dict[Device, list[int]] = defaultdict(list)
    for index, slot in enumerate(slots):
        for device in slot.node.devices:
            shown[device].append(index)
    found: list[Lane] = []
    for lane in _in_nodes({device: tuple(shown[device]) for device in sorted(shown)}):
        before = found[-1] if found else lane
        whole = {before.mesh.devices_per_node, lane.mesh.devices_per_node} == {devices_per_node}
        follows = before.mesh.first_node + before.mesh.num_nodes == lane.mesh.first_node
        if whole and follows and before.shown == lane.shown:
            found[-1] = replace(before, mesh=replace(before.mesh, num_nodes=before.mesh.num_nodes + 1))
        else:
            found.append(lane)
    return found


def _in_nodes(shown: Mapping[Device, tuple[int, ...]]) -> Iterator[Lane]:
    """Runs of devices, each within one node."""
    run: list[Device] = []
    for device in shown:
        if run and (device, shown[device]) != (Device(run[-1].node, run[-1].index + 1), shown[run[-1]]):
            yield _lane(run, shown)
            run = []
        run.append(device)
    if run:
        yield _lane(run, shown)


def _lane(run: Sequence[Device], shown: Mapping[Device, tuple[int, ...]]) -> Lane:
    return Lane(DeviceMesh(run[0].node, 1, run[0].index, len(run)), shown[run[0]])
