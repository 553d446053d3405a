"""Measured memory of each device next to its certificate, so that a run can refute the certificate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.memory.bytes import byte_size
from prefect_rlhf.placement.memory.certificate import Certificate
from prefect_rlhf.tasks.running.outcome import NodeOutcome

FILE = "memory.json"
"""The file of a run's folder with the measured memory, next to `certificate.json`."""
ROWS_SHOWN = 50


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's peak memory, and the limit by its certificate.

    On a GPU both are for the whole device. On CPU both count the tensors that engines keep between calls.
    """

    device: str
    certified_bytes: int
    measured_bytes: int = 0
    """On a GPU, the driver's count."""
    at: str = ""
    """The task run that reported the peak."""
    gpu: Mapping[str, int] = field(default_factory=dict)
    """The maximum of each GpuMemory field that its rank reported; of `free_bytes`, the minimum."""

    @property
    def is_beyond(self) -> bool:
        """Whether the device held more than its certificate permits."""
        return self.measured_bytes > self.certified_bytes

    def with_report(self, kept_bytes: int, gpu: Mapping[str, int], title: str) -> DeviceMemory:
        """Return the maximum of this and of a task run's report."""
        pick = {name: min if name == "free_bytes" else max for name in gpu}
        most = {name: pick[name](value, self.gpu.get(name, value)) for name, value in gpu.items()}
        measured = gpu.get("used_bytes", kept_bytes)
        if measured > self.measured_bytes:
            return DeviceMemory(self.device, self.certified_bytes, measured, title, most)
        return DeviceMemory(self.device, self.certified_bytes, self.measured_bytes, self.at, most or self.gpu)

    def row(self) -> dict[str, str]:
        """Return the device's row in the table."""
        measured = {"measured": byte_size(self.measured_bytes), "at": self.at}
        named = {name.removesuffix("_bytes"): byte_size(value) for name, value in self.gpu.items()}
        return {"device": self.device, "certified": byte_size(self.certified_bytes), **measured, **named}


class MeasuredMemory:
    """The devices of a run under a plan, and under the plans before it, oldest first.

    It keeps the maximum of all reports, and reports each device beyond its certificate once.
    """

    def __init__(self, certificate: Certificate, lease: Lease, before: MeasuredMemory | None = None) -> None:
        self._plan, self._before = certificate.plan, before
        resident = dict(certificate.most_resident)
        whole = {peak.device: peak.num_bytes for peak in certificate.peaks}
        certified = whole if lease.kind == "cuda" else resident
        self._by_rank = {
            str(rank): DeviceMemory(str(device), certified[str(device)])
            for rank, device in enumerate(lease.devices)
            if str(device) in certified  # no model uses the others
        }
        self._named: set[str] = set()

    def add(self, outcome: NodeOutcome, title: str) -> None:
        """Add the reports from a task run, or from building a model."""
        for rank, kept_bytes in outcome.device_bytes.items():
            device = self._by_rank.get(rank)
            if device is not None:
                self._by_rank[rank] = device.with_report(kept_bytes, outcome.gpu.get(rank, {}), title)

    @property
    def devices(self) -> Sequence[DeviceMemory]:
        """The devices that reported, starting with the device that is nearest to or furthest beyond its certificate."""
        reported = [device for device in self._by_rank.values() if device.at]
        return sorted(reported, key=lambda device: device.certified_bytes - device.measured_bytes)

    def excess(self) -> str | None:
        """Return a line about devices that exceeded their certificate since the last call, if any."""
        beyond = [device for device in self.devices if device.is_beyond and device.device not in self._named]
        if not beyond:
            return None
        self._named.update(device.device for device in beyond)
        worst, others = beyond[0], f"; {len(beyond) - 1} other devices exceed theirs too" if beyond[1:] else ""
        return (
            f"{worst.device} held {byte_size(worst.measured_bytes)} at {worst.at}, more than the "
            f"{byte_size(worst.certified_bytes)} of its certificate{others}. {FILE} has the numbers; the memory model "
            "is wrong here, so please report it"
        )

    def rows(self) -> list[dict[str, str]]:
        """Return the rows of a table."""
        return [device.row() for device in self.devices[:ROWS_SHOWN]]

    def to_json(self) -> str:
        """Return the devices as JSON, including those of each earlier plan: a warning of that time names this file."""
        return json.dumps({**self._of_plan(), "earlier_plans": self._earlier()})

    def _of_plan(self) -> dict[str, Any]:
        return {"plan": self._plan, "devices": [asdict(device) for device in self.devices]}

    def _earlier(self) -> list[dict[str, Any]]:
        return [] if self._before is None else [*self._before._earlier(), self._before._of_plan()]
