"""How much longer each node of a schedule could take before the whole would end later: 0 on the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from prefect_rlhf.placement.schedule import Schedule


def spare_seconds(schedule: Schedule) -> Mapping[str, float]:
    """By node id, as long as the order of nodes on each device stays what it is.

    A node's latest end is the latest start of whatever waits for it, or comes after it on one of its devices.
    """
    end = schedule.makespan_seconds
    by_dependency: dict[str, float] = defaultdict(lambda: end)
    by_resource: dict[object, float] = defaultdict(lambda: end)
    spare: dict[str, float] = {}
    order = sorted(enumerate(schedule.slots), key=lambda pair: (pair[1].start, pair[1].end, pair[0]), reverse=True)
    for _, slot in order:
        latest = min([by_dependency[slot.node.id], *(by_resource[one] for one in slot.node.occupies)])
        spare[slot.node.id] = max(0.0, latest - slot.end)
        start = latest - slot.seconds
        for name in slot.node.depends_on:
            by_dependency[name] = min(by_dependency[name], start)
        for one in slot.node.occupies:
            by_resource[one] = min(by_resource[one], start)
    return spare
