"""Proves that a plan fits: the peak memory use of each device over a run, by owner.

The proof holds for the memory model of this folder, which runs on one H100 have confirmed.

The count covers every order that the dependencies allow, not just one schedule. While a node runs, its devices hold the
resident tensors, every part that may then be between its reload and its offload, and the node's own needs. Nodes that
share a device never run at the same time, but copies over the host link run concurrently with them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from prefect_rlhf.errors.table import table
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.cost.paged_cache import check_cache
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape, Device, DeviceMesh, lanes
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.layout.sharing import borrowers, shared_weights, sharers
from prefect_rlhf.placement.memory.alike import Spread, classes
from prefect_rlhf.placement.memory.building import Building
from prefect_rlhf.placement.memory.bytes import base_bytes, byte_size
from prefect_rlhf.placement.memory.holdings import Kept, ResidentBytes, kept_bytes
from prefect_rlhf.placement.memory.hosts import HostLoad, fullest_host, host_loads
from prefect_rlhf.placement.memory.needs import ByteShare, Need, NodeNeeds, node_needs
from prefect_rlhf.placement.memory.overhead import DEVICE, spread_overhead
from prefect_rlhf.placement.memory.windows import OpenWindows, Window
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, instances
from prefect_rlhf.placement.rows.shares import most_rows

NEARLY_FULL = 0.96  # of a device's memory: more leaves less than the room that plans keep (`room.CARD_ROOM`)
STEPS_CERTIFIED = 3  # beyond the staleness: the first step, a middle step, the last step


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest moment of a device: while `node` runs, or between nodes if `node` is None.

    `device_bytes` is the device's memory.
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
        """Bytes that instances keep; the rest is freed when the node ends."""
        return sum(share.num_bytes for share in self.shares if not share.passing and share.owner != DEVICE)


@dataclass(frozen=True, slots=True)
class Certificate:
    """Every device's peak, including memory that is not in tensors."""

    plan: str
    peaks: tuple[Peak, ...]
    most_resident: tuple[tuple[str, int], ...]
    """By device, the most that instances keep at any moment."""
    excess_bytes: int
    """The bytes beyond the memory of devices and hosts, added up over these and over nodes. They measure how far a plan
    is from fitting, even if several moments are equally full."""
    hosts: tuple[HostLoad, ...] = ()
    """Those that keep offloaded parts."""

    @property
    def device_bytes(self) -> int:
        """Memory of the fullest device; 0 if every device is empty."""
        return self.fullest.device_bytes if self.fullest else 0

    @property
    def fits(self) -> bool:
        devices_fit = self.fullest is None or self.fullest.num_bytes <= self.fullest.device_bytes
        return devices_fit and not any(host.excess_bytes for host in self.hosts)

    @property
    def fullest(self) -> Peak | None:
        """The device with the largest peak relative to its memory; the first of equal devices."""
        distinct: dict[tuple[int, int], Peak] = {}  # devices alike have the same shares
        for peak in self.peaks:
            distinct.setdefault((id(peak.shares), peak.device_bytes), peak)
        return max(distinct.values(), key=lambda peak: peak.num_bytes / max(1, peak.device_bytes), default=None)

    def used_share(self, kept: float = 0.0) -> float:
        """Return the used share of the fullest device's memory; `kept` is the share of each device that plans keep
        free.
        """
        fullest = self.fullest
        return fullest.num_bytes / max(1, fullest.device_bytes) * (1 - kept) if fullest else 0.0

    def by_devices(self) -> dict[str, Peak]:
        """Return each peak by the names of its devices; equal devices share a peak."""
        nameless = {DeviceMesh.parse(peak.device).devices()[0]: replace(peak, device="") for peak in self.peaks}
        alike: dict[Peak, list[str]] = defaultdict(list)
        for lane in lanes(nameless):
            alike[nameless[lane.devices()[0]]].append(lane.name)
        return {", ".join(names): peak for peak, names in alike.items()}

    def rows(self) -> list[dict[str, str]]:
        """Return a table row for each device: its peak, the node, and the largest owners; equal devices share a row."""
        rows = []
        for devices, peak in self.by_devices().items():
            largest = sorted(peak.shares, key=lambda share: -share.num_bytes)[:3]
            rows.append(
                {
                    "devices": devices,
                    "peak": byte_size(peak.num_bytes),
                    "of": byte_size(peak.device_bytes),
                    "at": peak.node,
                    "largest": "; ".join(
                        f"{share.owner} {share.what} {byte_size(share.num_bytes)}" for share in largest
                    ),
                }
            )
        return rows

    def table(self) -> str:
        """Return the rows as aligned text, followed by the contents of the fullest device, largest first."""
        lines = [table(self.rows())]
        if self.fullest is not None:
            lines.append(f"{self.fullest.device} at {self.fullest.node} holds:")
            largest_first = sorted(self.fullest.shares, key=lambda share: -share.num_bytes)
            lines += [f"  {byte_size(share.num_bytes):>10}  {share.owner}: {share.what}" for share in largest_first]
        if (host := fullest_host(self.hosts)) is not None:
            lines.append(f"Of the bytes that leave the devices, {host}.")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return the certificate as JSON, with every share in bytes."""
        peaks = [{**asdict(peak), "num_bytes": peak.num_bytes} for peak in self.peaks]
        whole = {"plan": self.plan, "fits": self.fits, "device_bytes": self.device_bytes}
        return json.dumps({**whole, "peaks": peaks, "hosts": [asdict(host) for host in self.hosts]})


def during(node: str) -> str:
    """Say in words when a peak occurs.

    >>> during("ref_inference@1"), during("between nodes")
    ('during ref_inference', 'between calls')
    """
    return "between calls" if node == "between nodes" else f"during {node.partition('@')[0]}"


def certify_plan(
    plan: ExecutionPlan,
    graph: DataflowGraph,
    workload: Workload,
    backend: Backend,
    kept: Collection[ModelInstance] = (),
) -> Certificate:
    """Certify a plan; three steps beyond the staleness stand for a run of any number.

    Raises InvalidInput for a key-value cache that does not hold the longest row.
    """
    return certify(augment_few(graph, plan), workload, backend, kept)


def augment_few(graph: DataflowGraph, plan: ExecutionPlan) -> AugmentedGraph:
    """Return a graph of few steps that stands for a run of any length; a rare follow is put into every second step."""
    models = (
        replace(model, follows=replace(model.follows, every=min(model.follows.every, 2))) if model.follows else model
        for model in graph.models
    )
    return augment(replace(graph, models=tuple(models)), plan, graph.staleness + STEPS_CERTIFIED)


def certify(
    augmented: AugmentedGraph, workload: Workload, backend: Backend, kept: Collection[ModelInstance] = ()
) -> Certificate:
    """Count every device of the plan. Instances `kept` from an earlier plan come before all others.

    A few steps suffice, because later steps repeat them and add no kind of step.
    """
    plan, cluster = augmented.plan, augmented.plan.cluster
    held = _kept(augmented, workload.longest, backend)
    needs = node_needs(augmented, held, workload, backend)
    beside = spread_overhead(augmented.graph, plan, backend)
    found = _AlikeDevices(cluster, held, needs, beside, _bases(augmented.graph, plan))
    open_windows = OpenWindows(augmented)
    building = Building(augmented.graph, plan, workload, backend, kept)
    fullest: dict[object, _FullestMoment] = {}
    counted: dict[int, tuple[Peak, int]] = {}  # of each class: its peak, and the most that instances keep
    excess = 0
    for number, device, count in found:
        load = found.load(device)
        if load.signature not in fullest:
            builds = building.moments(load.held)
            fullest[load.signature] = load.fullest_moment(open_windows).or_fuller(builds)
        moment, memory = fullest[load.signature], cluster.memory_bytes(device // cluster.devices_per_node)
        base = base_bytes(memory, backend).items()
        always = (*(ByteShare(DEVICE, what, size, False) for what, size in base), *found.beside(device))
        counted[number] = Peak("", moment.node, (*always, *moment.shares), memory), moment.most_resident
        left = memory - _total(always)
        excess += count * sum(max(0, total - left) for total in moment.totals)
    peaks, most_resident = [], []
    for name, number in found.names():
        peak, most = counted[number]
        peaks.append(Peak(name, peak.node, peak.shares, peak.device_bytes))
        most_resident.append((name, most))
    hosts = host_loads(augmented, held, has_checkpoints=workload.has_checkpoints)
    excess += sum(host.excess_bytes for host in hosts)
    return Certificate(plan.name, tuple(peaks), tuple(most_resident), excess, hosts)


def _kept(augmented: AugmentedGraph, max_length: int, backend: Backend) -> dict[ModelInstance, Spread[Kept]]:
    """Bytes that each instance keeps on its devices. Raises InvalidInput for a cache smaller than a row's."""
    kept: dict[ModelInstance, Spread[Kept]] = {}
    graph, plan = augmented.graph, augmented.plan
    shared = shared_weights(graph, plan)
    for instance, calls in instances(graph, plan).items():
        model, cache = graph.model(instance.role), plan[calls[0].name].cache_bytes
        field = f"plan.calls.{calls[0].name}"
        check_cache(field, cache, max_length, ModelSizes.of(model), instance.strategy.tp)
        trained = any(call.kind == "train_step" for call in calls)
        rows = most_rows(graph, plan, calls)
        there = shared.get(instance, {})
        parts = ((own.part, there.get(own.name)) for own in graph.weights(instance.role))
        elsewhere = tuple((part, holder.engine) for part, holder in parts if holder is not None)
        kept[instance] = kept_bytes(
            instance, trained, model, max_length, backend, plan.cluster.devices_per_node, rows, cache, elsewhere
        )
    return kept


def _bases(graph: DataflowGraph, plan: ExecutionPlan) -> Mapping[ModelInstance, str]:
    """Name the weights that each instance holds for others, too; or the rest of a base that another engine holds."""
    found = {holder: f"base of {', '.join(roles)}" for holder, roles in sharers(graph, plan).items()}
    for instance in borrowers(graph, plan):
        found[instance] = f"rest of the {found.get(instance, f'base of {instance.role}')}"
    return found


class _AlikeDevices:
    """The devices of a plan in classes that hold and need the same; iterates over (class, its first device, count).

    Devices are numbers, node by node.
    """

    def __init__(
        self,
        cluster: ClusterShape,
        held: Mapping[ModelInstance, Spread[Kept]],
        needs: Sequence[NodeNeeds],
        beside: Spread[tuple[ByteShare, ...]],
        bases: Mapping[ModelInstance, str],
    ) -> None:
        self._per_node, num_devices = cluster.devices_per_node, cluster.num_nodes * cluster.devices_per_node
        self._held, self._needs, self._beside, self._bases = held, needs, beside, bases
        used: dict[int, Spread[Any]] = {id(each): each for each in held.values()}
        used |= {id(need.terms): need.terms for need in needs}
        self._columns = {key: spread.column(num_devices) for key, spread in used.items()}
        self._beside_column = beside.column(num_devices)
        memory = [cluster.memory_bytes(node) for node in range(cluster.num_nodes)] if cluster.node_memory_bytes else [0]
        by_memory = np.unique(memory, return_inverse=True)[1].repeat(self._per_node)
        columns = [*self._columns.values(), self._beside_column, *([by_memory] if cluster.node_memory_bytes else [])]
        first, classes_of = classes(columns, num_devices)
        is_used = np.any([column[first] > 0 for column in self._columns.values()], axis=0)
        self._devices = np.flatnonzero(is_used[classes_of])
        self._numbers = classes_of[self._devices]
        self._first = {number: int(first[number]) for number in np.flatnonzero(is_used).tolist()}
        self._made: dict[tuple[int, int], Need] = {}

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        counts = np.bincount(self._numbers)
        yield from ((number, device, int(counts[number])) for number, device in self._first.items())

    def names(self) -> Iterator[tuple[str, int]]:
        """Yield each device's name, in ascending order, and its class."""
        for number, device in zip(self._numbers.tolist(), self._devices.tolist(), strict=True):
            yield str(self._device(device)), number

    def beside(self, device: int) -> tuple[ByteShare, ...]:
        """Return the bytes that a device holds in addition to tensors."""
        kind = self._beside_column[device]
        return self._beside.values[kind - 1] if kind else ()

    def load(self, device: int) -> _DeviceLoad:
        """Return the load of a device, held and needed; equal needs are a single object."""

        def base(instance: ModelInstance, what: str) -> str:
            return self._bases.get(instance, "") if what == "weights" else ""

        held = [
            ResidentBytes(self._device(device), instance, what, size, base(instance, what))
            for instance, spread in self._held.items()
            if (kind := self._columns[id(spread)][device])
            for what, size in spread.values[kind - 1]
        ]
        needs = []
        for need in self._needs:
            if kind := int(self._columns[id(need.terms)][device]):
                if (need.position, kind) not in self._made:
                    self._made[need.position, kind] = need.of_kind(kind - 1)
                needs.append(self._made[need.position, kind])
        return _DeviceLoad(tuple(held), tuple(needs))

    def _device(self, number: int) -> Device:
        return Device(*divmod(number, self._per_node))


@dataclass(frozen=True, slots=True)
class _FullestMoment:
    """The node that runs at a device's fullest moment, and the shares then; `totals` are those while each node runs."""

    node: str
    shares: tuple[ByteShare, ...]
    most_resident: int
    totals: tuple[int, ...] = ()

    def or_fuller(self, builds: Iterable[tuple[str, tuple[ByteShare, ...]]]) -> _FullestMoment:
        """Return the fullest of this moment and of `builds`; each adds its total."""
        fullest = self
        for name, shares in builds:
            fullest = replace(fullest, totals=(*fullest.totals, _total(shares)))
            if _total(shares) > _total(fullest.shares):
                fullest = replace(fullest, node=name, shares=shares)
        return fullest


@dataclass(frozen=True, slots=True)
class _DeviceLoad:
    """A device: the bytes that resident instances keep on it, and the needs of the nodes that run on it."""

    held: tuple[ResidentBytes, ...]
    needs: tuple[Need, ...]

    @property
    def signature(self) -> object:
        """A value that is equal for devices with equal counts; a single object stands for each instance."""
        return tuple((id(kept.instance), kept.what, kept.num_bytes) for kept in self.held), self.needs

    def fullest_moment(self, every: OpenWindows) -> _FullestMoment:
        """Find the moment with most bytes, and the most that instances keep at any moment."""
        of_device = {kept.instance for kept in self.held}
        visits = [number for number, window in enumerate(every.windows) if window.instance in of_device]
        comes = {number: self._brought_by(every.windows[number]) for number in visits}
        visiting = {id(kept) for brought in comes.values() for kept in brought}
        staying = [kept for kept in self.held if id(kept) not in visiting]
        weights = {number: sum(kept.num_bytes for kept in held) for number, held in comes.items()}
        shares, mask = _shares(staying), sum(1 << number for number in visits)
        least = most = fullest = _total(shares)
        node, at_fullest, totals = "between nodes", shares, []
        brought: dict[int, tuple[tuple[ByteShare, ...], int]] = {}  # by the windows that may be open then
        for need in self.needs:
            open_then = every.during(need.position) & mask
            if open_then not in brought:
                able = [number for number in visits if open_then >> number & 1]
                chosen = every.heaviest(able, [weights[number] for number in able])
                there = _shares([kept for number in chosen for kept in comes[number]])
                brought[open_then] = there, least + _total(there)
            there, resident = brought[open_then]
            most, total = max(most, resident), resident + _total(need.shares)
            totals.append(total)
            if total > fullest:
                fullest, node, at_fullest = total, need.node, (*shares, *there, *need.shares)
        return _FullestMoment(node, at_fullest, most, tuple(totals))

    def _brought_by(self, window: Window) -> list[ResidentBytes]:
        return [kept for kept in self.held if kept.instance == window.instance and kept.moves_with(window.part)]


def _shares(held: Sequence[ResidentBytes]) -> tuple[ByteShare, ...]:
    return tuple(ByteShare(kept.instance.name, kept.label, kept.num_bytes, False) for kept in held)


def _total(shares: Sequence[ByteShare]) -> int:
    return sum(share.num_bytes for share in shares)
