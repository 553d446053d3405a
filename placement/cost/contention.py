"""How work slows down while several devices of a host are busy, because they share its processor, memory and links.

A profile has the time of each kind of work on 1, 2, ... devices of a host at once. A node is slowed down by its mesh's
own devices, and by devices of the same host that are busy with other work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field

from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.workload import ModelCallKind
from prefect_rlhf.placement.plan import EngineKind

Positive = Annotated[float, Field(gt=0)]
SharedWork = Literal[ModelCallKind, "move"]
"""A kind of call, or moving weights."""


@dataclass(frozen=True, slots=True)
class SlowDown:
    """How long a kind of work takes in an engine: `seconds[i]` while `busy[i]` devices of a host do it at once.

    The seconds end when the last of those devices is done. `busy` grows from 1 to all profiled devices. `profiled` is
    the sum of the profile's other times for that work, as a mean over all devices at once.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    work: SharedWork
    engine: EngineKind
    busy: Annotated[tuple[int, ...], Field(min_length=1)]
    seconds: Annotated[tuple[Positive, ...], Field(min_length=1)]
    profiled: Positive

    def factor(self, busy: float) -> float:
        """Return how many times longer than alone it takes while `busy` devices are busy, including itself.

        Values in between are interpolated; beyond the profiled number of devices the factor stays. The factor never
        falls, so measurement noise cannot make more devices faster.

        >>> SlowDown("train_step", "megatron", (1, 2, 4), (1.0, 0.9, 2.0), 1.9).factor(3)
        1.5
        """
        highest = tuple(accumulate(self.seconds, max))
        return float(np.interp(busy, self.busy, highest)) / highest[0]

    def of_profiled(self, busy: float) -> float:
        """Return the seconds with `busy` busy devices, relative to the profile's own times."""
        return self.factor(busy) * self.seconds[0] / self.profiled


@dataclass(frozen=True, slots=True)
class Demand:
    """The load of a node on its hosts while it runs."""

    devices: Mapping[int, float]
    """For each host (a node of the cluster), how many of its devices work at once on average; the node's undisturbed
    time includes them."""
    share: float
    """The fraction of the node's time that they work; the controller takes the rest."""
    slow_down: SlowDown | None = None
    """None if the effect of other work is unknown."""

    def times_longer(self, others: Mapping[int, float]) -> float:
        """Return how many times longer than alone it takes if each host has `others` more busy devices."""
        if self.slow_down is None:
            return 1.0
        slowest = max(
            (self.slow_down.factor(own + others.get(host, 0.0)) / self.slow_down.factor(own))
            for host, own in self.devices.items()
        )
        return 1.0 + self.share * (slowest - 1.0)


def working_share(cost: Seconds) -> float:
    """Return the share of its time that a call's device works; in a bubble it waits for the others."""
    return 1.0 - (cost.pipeline_bubble + cost.environment) / cost.worked if cost.worked else 0.0


def times_longer(demands: Sequence[Demand]) -> list[float]:
    """Return the factor by which each of several concurrent nodes takes longer than alone.

    >>> slow = SlowDown("inference", "megatron", (1, 2), (1.0, 1.5), 1.5)
    >>> times_longer([Demand({0: 1.0}, 1.0, slow), Demand({0: 1.0}, 1.0), Demand({1: 1.0}, 1.0, slow)])
    [1.5, 1.0, 1.0]
    """
    loads = [{host: demand.share * devices for host, devices in demand.devices.items()} for demand in demands]
    whole: dict[int, float] = {}
    for load in loads:
        for host, busy in load.items():
            whole[host] = whole.get(host, 0.0) + busy
    return [
        demand.times_longer({host: whole[host] - busy for host, busy in load.items()})
        for demand, load in zip(demands, loads, strict=True)
    ]
