"""The proof that a plan fits: the most bytes that each device can hold at any moment of a run, and what they are.

Counted for every order in which the dependencies let nodes run, not for one schedule: while a node runs, its devices
hold what stays, whatever may be between its reload and its offload at that time, and what the node itself needs. Nodes
that share a device never run at the same time, but copies over the host link run beside them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import networkx as nx

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.lease import Backend
from prefect_rlhf.placement.memory.bytes import (
    byte_size,
    usable_bytes,
)
from prefect_rlhf.placement.memory.holdings import ResidentBytes, instance_holdings
from prefect_rlhf.placement.memory.needs import (
    ByteShare,
    _Need,
    _needs,
)
from prefect_rlhf.placement.memory.windows import _opened, _Order, _Window, _windows
from prefect_rlhf.placement.mesh import Device, DeviceMesh, lanes
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.table import table


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment of a device: while `node` runs, or between nodes where nothing runs on it.

    `device_bytes` is what the device has, of which `usable_bytes` may be filled.
    """

    device: str
    node: str
    shares: tuple[ByteShare, ...]
    device_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(share.num_bytes for share in self.shares)

    @property
    def resident_bytes(self) -> int:
        """What instances keep; the rest passes with the node."""
        return sum(share.num_bytes for share in self.shares if not share.passing)

    @property
    def usable_bytes(self) -> int:
        return usable_bytes(self.device_bytes)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Every device's peak. `most_resident` is, by device, the most that instances keep at any moment.

    `excess_bytes` adds up, over devices and nodes, what goes beyond the usable bytes: how far a plan is from fitting,
    even where several moments are equally full.
    """

    plan: str
    peaks: tuple[Peak, ...]
    most_resident: tuple[tuple[str, int], ...]
    excess_bytes: int

    @property
    def device_bytes(self) -> int:
        """What the fullest device has; 0 where no device holds anything."""
        return self.fullest.device_bytes if self.fullest else 0

    @property
    def usable_bytes(self) -> int:
        """What of the fullest device may be filled."""
        return usable_bytes(self.device_bytes)

    @property
    def fits(self) -> bool:
        return self.fullest is None or self.fullest.num_bytes <= self.fullest.usable_bytes

    @property
    def fullest(self) -> Peak | None:
        """The device whose peak is the largest share of what it may hold, the first of equal ones."""
        return max(self.peaks, key=lambda peak: peak.num_bytes / max(1, peak.usable_bytes), default=None)

    def rows(self) -> list[dict[str, str]]:
        """For a table: each device with its peak, the node, and what holds most; equal devices share a row."""
        nameless = {DeviceMesh.parse(peak.device).devices()[0]: replace(peak, device="") for peak in self.peaks}
        alike: dict[Peak, list[str]] = defaultdict(list)
        for lane in lanes(nameless):
            alike[nameless[lane.devices()[0]]].append(lane.name)
        return [_row(names, peak) for peak, names in alike.items()]

    def table(self) -> str:
        """The rows as aligned text, then what the fullest device holds, the largest first."""
        lines = [table(self.rows())]
        if self.fullest is not None:
            lines.append(f"{self.fullest.device} at {self.fullest.node} holds:")
            held = sorted(self.fullest.shares, key=lambda share: -share.num_bytes)
            lines += [f"  {byte_size(share.num_bytes):>10}  {share.owner}: {share.what}" for share in held]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Machine-readable: the same with every share in bytes."""
        peaks = [{**asdict(peak), "num_bytes": peak.num_bytes} for peak in self.peaks]
        whole = {"plan": self.plan, "fits": self.fits, "device_bytes": self.device_bytes}
        return json.dumps({**whole, "usable_bytes": self.usable_bytes, "peaks": peaks})


def certify(augmented: AugmentedGraph, workload: Workload, kind: Backend) -> Certificate:
    """Count every device of the plan.

    A few steps suffice: enough that every kind of step is there, since what follows repeats.
    """
    held = _holdings(augmented, workload.longest, kind)
    order, windows = _Order(augmented), _windows(augmented)
    needs = _needs(augmented, held, workload, kind)
    cluster = augmented.plan.cluster
    counted: dict[object, _Fullest] = {}
    peaks, most, excess = [], [], 0
    for device in sorted(held.keys() | needs.keys()):
        here = _Here(tuple(held.get(device, ())), tuple(needs.get(device, ())))
        if here.signature not in counted:
            counted[here.signature] = here.fullest(order, windows)
        found = counted[here.signature]
        peaks.append(Peak(str(device), found.node, found.shares, cluster.memory_bytes(device.node)))
        most.append((str(device), found.most_resident))
        excess += sum(max(0, total - peaks[-1].usable_bytes) for total in found.totals)
    return Certificate(augmented.plan.name, tuple(peaks), tuple(most), excess)


@dataclass(frozen=True, slots=True)
class _Fullest:
    node: str
    shares: tuple[ByteShare, ...]
    most_resident: int
    totals: tuple[int, ...] = ()  # while each node runs


@dataclass(frozen=True, slots=True)
class _Here:
    """One device: what instances keep on it while they are there, and what the nodes that run on it need."""

    held: tuple[ResidentBytes, ...]
    needs: tuple[_Need, ...]

    @property
    def signature(self) -> object:
        """Equal for devices that count the same."""
        return tuple((holding.instance, holding.what, holding.num_bytes) for holding in self.held), self.needs

    def fullest(self, order: _Order, windows: Sequence[_Window]) -> _Fullest:
        """The moment with most bytes, and the most that instances keep at any moment."""
        mine = [window for window in windows if any(h.instance == window.instance for h in self.held)]
        stays = _shares(self._stays(mine))
        best, most, totals = _Fullest("between nodes", stays, 0), _total(stays), []
        for need in self.needs:
            there = (*stays, *_shares(self._visits(need.position, order, mine)))
            most = max(most, _total(there))
            totals.append(_total((*there, *need.shares)))
            if totals[-1] > _total(best.shares):
                best = _Fullest(need.node, (*there, *need.shares), 0)
        return replace(best, most_resident=most, totals=tuple(totals))

    def _stays(self, windows: Sequence[_Window]) -> list[ResidentBytes]:
        """What no window takes away."""
        parts = {window.instance: window.part for window in windows}
        return [h for h in self.held if h.instance not in parts or not h.moves_with(parts[h.instance])]

    def _visits(self, node: int, order: _Order, windows: Sequence[_Window]) -> list[ResidentBytes]:
        """The most that may visit while a node runs: the heaviest windows that may be open then, and all at once."""
        able = [window for window in windows if order.may_be_open(window, node)]
        if len(able) < 2:
            return [holding for window in able for holding in self._of(window)]
        together: nx.Graph[_Window] = nx.Graph()
        for window in able:
            together.add_node(window, weight=sum(holding.num_bytes for holding in self._of(window)))
        for index, one in enumerate(able):
            together.add_edges_from((one, other) for other in able[:index] if order.may_overlap(one, other))
        chosen, _ = nx.max_weight_clique(together)
        return [holding for window in sorted(chosen, key=_opened) for holding in self._of(window)]

    def _of(self, window: _Window) -> list[ResidentBytes]:
        return [h for h in self.held if h.instance == window.instance and h.moves_with(window.part)]


def _holdings(augmented: AugmentedGraph, max_length: int, kind: Backend) -> dict[Device, list[ResidentBytes]]:
    held: dict[Device, list[ResidentBytes]] = defaultdict(list)
    speeds = augmented.plan.cluster.node_speeds
    for instance, calls in instances(augmented.graph, augmented.plan).items():
        model = augmented.graph.model(instance.role)
        cuts = [augmented.plan[call.name].micro_batches for call in calls]
        for holding in instance_holdings(instance, calls, model, max_length, kind, speeds, cuts):
            held[holding.device].append(holding)
    return held


def _shares(held: Sequence[ResidentBytes]) -> tuple[ByteShare, ...]:
    return tuple(ByteShare(holding.instance.name, holding.what, holding.num_bytes, False) for holding in held)


def _total(shares: Sequence[ByteShare]) -> int:
    return sum(share.num_bytes for share in shares)


def _row(devices: Sequence[str], peak: Peak) -> dict[str, str]:
    largest = sorted(peak.shares, key=lambda share: -share.num_bytes)[:3]
    return {
        "devices": ", ".join(devices),
        "peak": byte_size(peak.num_bytes),
        "of": byte_size(peak.usable_bytes),
        "at": peak.node,
        "largest": "; ".join(f"{share.owner} {share.what} {byte_size(share.num_bytes)}" for share in largest),
    }


STEPS_CERTIFIED = 3  # beyond the staleness: the first, one between, and the last


def certify_plan(plan: ExecutionPlan, graph: DataflowGraph, workload: Workload, kind: Backend) -> Certificate:
    """The certificate of a run of any number of steps."""
    return certify(augment(graph, plan, graph.staleness + STEPS_CERTIFIED), workload, kind)
