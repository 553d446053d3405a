"""The proof that a plan fits: the most bytes that each device can hold at any moment of a run, and what they are.

Counted for every order in which the dependencies let nodes run, not for one schedule: while a node runs, its devices
hold what stays, whatever may be between its reload and its offload at that time, and what the node itself needs. Nodes
that share a device never run at the same time, but copies over the host link run beside them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import ceil

import networkx as nx

from prefect_rlhf.placement.augmented import AugmentedGraph
from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.moves import reallocation_flows
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.uneven import replica_works
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.draw import table
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.holdings import Holding, instance_holdings
from prefect_rlhf.placement.instances import instances
from prefect_rlhf.placement.lanes import lanes
from prefect_rlhf.placement.lease import DeviceKind
from prefect_rlhf.placement.mesh import Device, DeviceMesh
from prefect_rlhf.placement.node import Node
from prefect_rlhf.placement.plan import ModelInstance, Part

GIB, MIB = 1 << 30, 1 << 20
BUCKET_BYTES = 64 << 20  # of weights staged at a time in a reallocate: one bucket goes out while one comes in
RESERVED_SHARE = 0.08  # of a device: contexts and buffers of CUDA and collectives, fragments that nothing fits in
STATIC = ("weights", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class Share:
    """`num_bytes` of one kind on a device; `owner` names the instance, or the node that needs them while it runs."""

    owner: str
    what: str
    num_bytes: int
    passing: bool


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment of a device: while `node` runs, or between nodes where nothing runs on it.

    `device_bytes` is what the device has, of which `usable_bytes` may be filled.
    """

    device: str
    node: str
    shares: tuple[Share, ...]
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


def certify(augmented: AugmentedGraph, workload: Workload, kind: DeviceKind) -> Certificate:
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


def usable_bytes(device_bytes: int) -> int:
    """What of a device's memory a plan may fill."""
    return int(device_bytes * (1 - RESERVED_SHARE))


def enough_bytes(filled_bytes: int) -> int:
    """The memory, in whole GiB, of which a plan may fill so much.

    >>> enough_bytes(73 * GIB) // GIB, enough_bytes(74 * GIB) // GIB
    (80, 81)
    """
    return ceil((filled_bytes + 1) / (1 - RESERVED_SHARE) / GIB) * GIB


@dataclass(frozen=True, slots=True)
class _Window:
    """From the reload of a part of an instance to its offload, by position in the graph; None: to the end."""

    instance: ModelInstance
    part: Part
    opened: int
    closed: int | None


class _Order:
    """Which nodes must have ended before which others start, in whatever order a run takes."""

    def __init__(self, augmented: AugmentedGraph) -> None:
        position = {node.id: index for index, node in enumerate(augmented.nodes)}
        self._before: list[int] = []
        for node in augmented.nodes:
            mask = 0
            for name in node.depends_on:
                mask |= self._before[position[name]] | 1 << position[name]
            self._before.append(mask)

    def precedes(self, one: int, other: int) -> bool:
        return bool(self._before[other] >> one & 1)

    def may_be_open(self, window: _Window, node: int) -> bool:
        """Whether a window's content may be there while a node runs."""
        gone = window.closed is not None and self.precedes(window.closed, node)
        return not gone and not self.precedes(node, window.opened)

    def may_overlap(self, one: _Window, other: _Window) -> bool:
        """Whether both may be open at once; an instance comes and goes one window at a time."""
        apart = (a.closed is not None and self.precedes(a.closed, b.opened) for a, b in ((one, other), (other, one)))
        return one.instance != other.instance and not any(apart)


@dataclass(frozen=True, slots=True)
class _Fullest:
    node: str
    shares: tuple[Share, ...]
    most_resident: int
    totals: tuple[int, ...] = ()  # while each node runs


@dataclass(frozen=True, slots=True, eq=False)  # devices that need the same share one: it is equal to itself alone
class _Need:
    """What a node needs on a device while it runs; `position` is the node's in the graph."""

    position: int
    node: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class _Here:
    """One device: what instances keep on it while they are there, and what the nodes that run on it need."""

    held: tuple[Holding, ...]
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

    def _stays(self, windows: Sequence[_Window]) -> list[Holding]:
        """What no window takes away."""
        parts = {window.instance: window.part for window in windows}
        return [h for h in self.held if h.instance not in parts or not h.moves_with(parts[h.instance])]

    def _visits(self, node: int, order: _Order, windows: Sequence[_Window]) -> list[Holding]:
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

    def _of(self, window: _Window) -> list[Holding]:
        return [h for h in self.held if h.instance == window.instance and h.moves_with(window.part)]


def _opened(window: _Window) -> int:
    return window.opened


def _holdings(augmented: AugmentedGraph, max_length: int, kind: DeviceKind) -> dict[Device, list[Holding]]:
    held: dict[Device, list[Holding]] = defaultdict(list)
    speeds = augmented.plan.cluster.node_speeds
    for instance, calls in instances(augmented.graph, augmented.plan).items():
        model = augmented.graph.model(instance.role)
        cuts = [augmented.plan[call.name].micro_batches for call in calls]
        for holding in instance_holdings(instance, calls, model, max_length, kind, speeds, cuts):
            held[holding.device].append(holding)
    return held


def _windows(augmented: AugmentedGraph) -> list[_Window]:
    """Each reload with the offload of the same part that comes next."""
    found: list[_Window] = []
    opened: dict[tuple[ModelInstance, Part], int] = {}
    for index, node in enumerate(augmented.nodes):
        if node.kind in ("reload", "offload"):
            assert node.instance is not None  # set for both kinds
            if node.kind == "reload":
                opened[node.instance, node.part] = index
            else:
                found.append(_Window(node.instance, node.part, opened.pop((node.instance, node.part), 0), index))
    return found + [_Window(instance, part, index, None) for (instance, part), index in opened.items()]


def _needs(
    augmented: AugmentedGraph, held: Mapping[Device, Sequence[Holding]], workload: Workload, kind: DeviceKind
) -> dict[Device, list[_Need]]:
    """What each node needs on each of its devices."""
    needs: dict[Device, list[_Need]] = defaultdict(list)
    of_move = cache(partial(_staged_by_move, augmented.graph))  # the same in every step
    for index, node in enumerate(augmented.nodes):
        of_device = _of_call(augmented, node, workload, kind)
        if node.kind == "reallocate":
            assert node.source is not None and node.target is not None  # set for every reallocate
            of_device = of_move(node.source, node.target)
        elif node.kind == "export":
            of_device = {device: _staged_by_export(node, held.get(device, ())) for device in node.devices}
        made: dict[tuple[tuple[str, int], ...], _Need] = {}
        for device in node.devices:
            sizes = tuple(of_device[device].items()) if device in of_device else ()
            if sizes not in made:
                shares = (Share(node.id, what, size, True) for what, size in sizes if size)
                made[sizes] = _Need(index, node.id, tuple(shares))
            needs[device].append(made[sizes])
    return needs


def _of_call(
    augmented: AugmentedGraph, node: Node, workload: Workload, kind: DeviceKind
) -> dict[Device, Mapping[str, int]]:
    """Active bytes of a model function call, by device: equal for equal stages of replicas with equally many rows."""
    call, placement = node.call, node.placement
    if node.kind not in ("generate", "inference", "train_step") or call is None or placement is None:
        return {}
    sizes = ModelSizes.of(augmented.graph.model(call.role or ""))
    work, execution, engine = CallWork.of(call, workload), Execution.of(placement), placement.engine
    kept = (*STATIC, "kv_cache") if engine == "vllm" else STATIC  # vLLM takes its cache once, for good
    works = replica_works(work, placement, augmented.plan.cluster.node_speeds)

    @cache
    def shares(rows: int, stage: int) -> Mapping[str, int]:
        mine = replace(work, rows=rows)
        found = call_bytes(mine, execution, sizes, engine, stage, on_cpu=kind == "cpu").by_term()
        return {what.replace("_", " "): size for what, size in found.items() if what not in kept}

    coordinates = zip(placement.devices, placement.strategy.coordinates(), strict=True)
    return {device: shares(works[at.dp].rows, at.pp) for device, at in coordinates}


def _staged_by_move(
    graph: DataflowGraph, source: ModelInstance, target: ModelInstance
) -> dict[Device, Mapping[str, int]]:
    """At most a bucket of what leaves a device for others, and one of what arrives; what stays is copied in place."""
    sizes = ModelSizes.of(graph.model(source.role))
    sent: dict[Device, float] = defaultdict(float)
    received: dict[Device, float] = defaultdict(float)
    for flow in reallocation_flows(source, target, sizes):
        if flow.source != flow.target:
            sent[flow.source] += flow.num_bytes
            received[flow.target] += flow.num_bytes
    return {
        device: {"staged weights": sum(min(BUCKET_BYTES, ceil(ways[device])) for ways in (sent, received))}
        for device in {*source.devices, *target.devices}
    }


def _staged_by_export(node: Node, held: Sequence[Holding]) -> Mapping[str, int]:
    """What is written is gathered tensor by tensor."""
    weights = sum(h.num_bytes for h in held if h.instance == node.instance and h.what == "weights")
    return {"staged weights": min(BUCKET_BYTES, weights)}


def _shares(held: Sequence[Holding]) -> tuple[Share, ...]:
    return tuple(Share(holding.instance.name, holding.what, holding.num_bytes, False) for holding in held)


def _total(shares: Sequence[Share]) -> int:
    return sum(share.num_bytes for share in shares)


def byte_size(num_bytes: int) -> str:
    """In the unit that people would choose.

    >>> byte_size(3 << 29), byte_size(5 << 20)
    ('1.50 GiB', '5.00 MiB')
    """
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.2f} MiB"


def _row(devices: Sequence[str], peak: Peak) -> dict[str, str]:
    largest = sorted(peak.shares, key=lambda share: -share.num_bytes)[:3]
    return {
        "devices": ", ".join(devices),
        "peak": byte_size(peak.num_bytes),
        "of": byte_size(peak.usable_bytes),
        "at": peak.node,
        "largest": "; ".join(f"{share.owner} {share.what} {byte_size(share.num_bytes)}" for share in largest),
    }
