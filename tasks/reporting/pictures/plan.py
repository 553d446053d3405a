"""A plan's schedule as a picture; neighbouring devices with the same schedule share a lane."""

from __future__ import annotations

from collections import defaultdict

from prefect_rlhf.placement.devices.mesh import Device, lanes
from prefect_rlhf.placement.schedule.estimate import Estimate
from prefect_rlhf.placement.schedule.schedule import Schedule
from prefect_rlhf.tasks.reporting.pictures.timeline import Bar, timeline_svg

STEPS_DRAWN = 2


def plan_svg(estimate: Estimate, num_steps: int = STEPS_DRAWN) -> str:
    """Draw the first of several equal steps as SVG. Nodes that take no time are left out."""
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


def schedule_bars(schedule: Schedule, num_steps: int | None = None) -> tuple[Bar, ...]:
    """Return a timeline's bars for the first `num_steps` steps, or all steps. Nodes that take no time are left out.

    The evaluation before training is shown beside the first steps.
    """
    first = max(1, min((slot.node.step for slot in schedule.slots), default=1))
    return tuple(
        Bar(slot.node.title, slot.node.kind, tuple(map(str, sorted(slot.node.devices))), slot.start, slot.end)
        for slot in schedule.slots
        if slot.end > slot.start and (num_steps is None or slot.node.step < first + num_steps)
    )
