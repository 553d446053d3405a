"""What a plan would do and when, as a picture: devices next to each other that do the same share a lane."""

from __future__ import annotations

from collections import defaultdict

from prefect_rlhf.placement.estimate import Estimate
from prefect_rlhf.placement.lanes import lanes
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.timeline import Bar, timeline_svg

STEPS_SHOWN = 2


def plan_svg(estimate: Estimate, num_steps: int = STEPS_SHOWN) -> str:
    """The first of the steps that are alike, as SVG. Nodes that take no time are left out."""
    steps = range(estimate.first_step, estimate.first_step + num_steps)
    slots = [slot for slot in estimate.schedule.slots if slot.node.step in steps and slot.seconds > 0]
    shown: dict[Device, tuple[int, ...]] = defaultdict(tuple)
    for index, slot in enumerate(slots):
        for device in slot.node.devices:
            shown[device] += (index,)
    lanes_of: dict[int, list[str]] = defaultdict(list)
    for lane in lanes(shown):
        for index in shown[lane.devices()[0]]:
            lanes_of[index].append(lane.name)
    return timeline_svg(
        [Bar(slot.node.title, slot.node.kind, tuple(lanes_of[i]), slot.start, slot.end) for i, slot in enumerate(slots)]
    )
