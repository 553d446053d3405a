"""Detects whether a profile and a probe of the same devices contradict each other about a layer or a link."""

from __future__ import annotations

from collections.abc import Iterator

from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.profile import Profile, ProfiledTimes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes

CONTRADICTION = 2.5
"""The factor above which two times contradict each other. A load of 10 on two cores made profiles up to 2.5 times too
slow, so other programs explain no larger factor; their share is reported separately."""


def contradictions(profile: Profile, probed: Hardware) -> list[str]:
    """Return each time that the profile and the node with probed speeds state differently, with both values."""
    return [
        f"{name} {_milliseconds(measured)} ms by the profile, {_milliseconds(by_probe)} ms by the probe"
        for name, measured, by_probe in _compared(profile, probed)
        if not 1 / CONTRADICTION <= measured / by_probe <= CONTRADICTION
    ]


def _compared(profile: Profile, probed: Hardware) -> Iterator[tuple[str, float, float]]:
    """Yield the name of some work, and its seconds by each: a layer at the largest timed sizes, and a link."""
    sizes = ModelSizes.of_shape(profile.shape, dtype=profile.dtype)
    times, roofline = ProfiledTimes(profile, sizes), DatasheetTimes.of(sizes, probed)
    timed = {(each.piece, each.rows, each.length) for each in profile.measurements if each.tp == 1}
    for piece, name in (("forward", "a layer's forward"), ("backward", "a layer's backward")):
        largest = max(((rows, length) for of, rows, length in timed if of == piece), default=None)
        if largest is not None:
            seconds = getattr(times, piece)(*largest, 1).total
            yield f"{name} of {largest[0]} x {largest[1]} tokens", seconds, getattr(roofline, piece)(*largest, 1).total
    if profile.num_devices > 1:
        yield "a megabyte between devices", 1e6 / profile.links.node, 1e6 / probed.links().node


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
