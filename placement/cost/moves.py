"""How long it takes to move bytes: weights between instances, rows between calls, weights to host memory and back.

Every device sends and receives on all its links at once, so the busiest link determines the time (ReaL, section 5.1:
the size over the bandwidth). Bytes that stay on a device are read and written in its memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache, partial
from typing import NamedTuple

from prefect_rlhf.placement.cost.datasheets.hardware import Links, LinkSpan
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.devices.strategy import Coordinate
from prefect_rlhf.placement.layout.experts import experts_held
from prefect_rlhf.placement.layout.layout import stages
from prefect_rlhf.placement.models.engine_constants import COLUMN_BYTES, TOKEN_BYTES
from prefect_rlhf.placement.models.outputs import OUTPUTS
from prefect_rlhf.placement.plan import ModelInstance, device_coordinates
from prefect_rlhf.placement.rows.moves import DeviceTransfer, PlacedMoves, transfers_of_equal_rows
from prefect_rlhf.placement.rows.partition import Part

_UNSPLIT = -1  # in place of a tp part: what tp does not split, which every part holds
_TABLE = -1  # in place of a stage: an embedding tied to the output, which the first stage holds and the last
DISK_BYTES_PER_SECOND = 0.5e9
"""One rank on a local disk, as measured (docs/internals/measured_log.md): the slowest disk that a checkpoint should
meet."""
_Part = tuple[int, ...]  # stage and tp part that a device holds; for experts also their numbers


class ColumnBytes(NamedTuple):
    """A column's bytes per row, and per token of the whole row or of its response."""

    row: int = 0
    token: int = 0
    response_token: int = 0


_BYTES = {
    "tokens": ColumnBytes(token=TOKEN_BYTES),
    **dict.fromkeys(("scores", "prompt_length", "rewards"), ColumnBytes(row=COLUMN_BYTES)),
    "mask": ColumnBytes(response_token=1),
    "turn": ColumnBytes(response_token=2),
    **dict.fromkeys(("turn_rewards", "truncated"), ColumnBytes(row=COLUMN_BYTES)),
}
_OTHER = ColumnBytes(response_token=COLUMN_BYTES)  # of a key that is in no table


def _column_bytes(key: str) -> ColumnBytes:
    """Return the bytes of a column: as the table has it, as an output of models, or a number for each token."""
    if key in _BYTES or (output := OUTPUTS.get(key)) is None:
        return _BYTES.get(key, _OTHER)
    num_bytes = COLUMN_BYTES * output.numbers
    return ColumnBytes(row=num_bytes) if output.per == "row" else ColumnBytes(response_token=num_bytes)


class Flow(NamedTuple):
    """Bytes that move from one device to another; a flow to the same device is a copy.

    A named tuple, because a plan with many devices has many thousands of flows.
    """

    source: Device
    target: Device
    num_bytes: float

    @property
    def span(self) -> LinkSpan:
        if self.source == self.target:
            return "device"
        return "node" if self.source.node == self.target.node else "network"


class Loads(NamedTuple):
    """The bytes that each device sends and receives, by link."""

    sent: defaultdict[LinkSpan, defaultdict[Device, float]]
    received: defaultdict[LinkSpan, defaultdict[Device, float]]

    @classmethod
    def none(cls) -> Loads:
        return cls(defaultdict(lambda: defaultdict(float)), defaultdict(lambda: defaultdict(float)))


def move_seconds(flows: Iterable[Flow], links: Links) -> float:
    """Return the seconds until the busiest link is done.

    >>> links = Links(device=2e12, node=1e11, network=1e10, host=2e10)
    >>> move_seconds([Flow(Device(0, 0), Device(0, 1), 1e9), Flow(Device(0, 0), Device(1, 0), 1e9)], links)
    0.1
    """
    return _busiest_seconds(_fullest_of(flows), links)


def _fullest_of(flows: Iterable[Flow]) -> tuple[tuple[LinkSpan, float], ...]:
    loads = Loads.none()
    for flow in flows:
        span = flow.span
        loads.sent[span][flow.source] += flow.num_bytes
        loads.received[span][flow.target] += flow.num_bytes
    return _fullest(loads)


def _busiest_seconds(fullest: Iterable[tuple[LinkSpan, float]], links: Links) -> float:
    return max((links.seconds(num_bytes, span) for span, num_bytes in fullest), default=0.0)


def _fullest(loads: Loads) -> tuple[tuple[LinkSpan, float], ...]:
    """The most bytes that a device sends, and the most that a device receives, over each kind of link."""
    return tuple((span, max(load.values())) for ways in loads for span, load in ways.items())


def reallocation_seconds(source: ModelInstance, target: ModelInstance, sizes: ModelSizes, links: Links) -> float:
    """Return the seconds to bring a source's weights to a target's devices."""
    return _busiest_seconds(_fullest_of_reallocation(source, target, sizes), links)


@lru_cache(maxsize=4096)  # the plans that a question compares share most of their moves
def _fullest_of_reallocation(
    source: ModelInstance, target: ModelInstance, sizes: ModelSizes
) -> tuple[tuple[LinkSpan, float], ...]:
    return _fullest(reallocation_loads(source, target, sizes))


def transfer_seconds(placed: PlacedMoves, part: Part, workload: Workload, links: Links) -> float:
    """Return the seconds to bring the rows of a part to a call's devices, as if all rows were equally long."""
    return _busiest_seconds(_fullest_of_transfers(placed, part, workload), links)


@lru_cache(maxsize=4096)  # the plans that a question compares share most of their moves
def _fullest_of_transfers(placed: PlacedMoves, part: Part, workload: Workload) -> tuple[tuple[LinkSpan, float], ...]:
    return _fullest(transfer_loads(transfers_of_equal_rows(placed, part), workload))


def transfer_loads(transfers: Iterable[DeviceTransfer], workload: Workload) -> Loads:
    """Return the bytes of rows that devices send each other, without making a flow for each of many thousand
    transfers.
    """
    loads, of_row = Loads.none(), cache(partial(row_bytes, workload=workload))  # most transfers have the same keys
    for source, target, _, keys, rows in transfers:
        span: LinkSpan = "node" if source.node == target.node else "network"
        num_bytes = len(rows) * of_row(keys)
        loads.sent[span][source] += num_bytes
        loads.received[span][target] += num_bytes
    return loads


def row_bytes(keys: Iterable[str], workload: Workload) -> float:
    """Return the bytes of a row's `keys`.

    >>> row_bytes(("tokens", "logprobs", "scores"), Workload.fixed(10, 6))
    156.0
    """

    def of_key(key: str) -> float:
        of = _column_bytes(key)
        return of.row + of.token * workload.mean_length + of.response_token * workload.responses.mean

    return sum(map(of_key, keys))


def host_seconds(num_bytes: float, links: Links) -> float:
    """Return the seconds to offload or reload a device's bytes over its host link (ReaL, section 6)."""
    return links.seconds(num_bytes, "host")


def disk_seconds(num_bytes: float) -> float:
    """Return the seconds for a rank to write a checkpoint's bytes, including checksums and flushing."""
    return num_bytes / DISK_BYTES_PER_SECOND


def reallocation_loads(source: ModelInstance, target: ModelInstance, sizes: ModelSizes) -> Loads:
    """Return the bytes of trained weights that `reshard` would move between two instances' devices, in closed form.

    The sum is over pairs of stages, of tp parts, and of shares of experts.

    A device keeps the part it has; the rest comes in equal amounts from holders on its node, or from other nodes if its
    own node has no holder.
    """
    holders: dict[_Part, list[Device]] = defaultdict(list)
    on_node: dict[tuple[_Part, int], list[Device]] = defaultdict(list)
    parts = {device: _parts_held(at, source, sizes) for device, at in device_coordinates(source)}
    for device, held in parts.items():
        for part in held:
            holders[part].append(device)
            on_node[part, device.node].append(device)

    @cache
    def needed(stage: int, part: int, experts: int) -> Mapping[_Part, float]:
        return _needed(Coordinate(experts, part, stage), source, target, sizes)

    loads, item, sizes = Loads.none(), sizes.item, sizes.held_by(target.engine)
    asked: dict[tuple[_Part, int | None], float] = defaultdict(float)  # of a node's holders; None: of all
    for device, at in device_coordinates(target):
        for part, elements in needed(at.pp, at.tp, at.dp % target.strategy.ep).items():
            if part in parts.get(device, ()):
                loads.sent["device"][device] += elements * item
                loads.received["device"][device] += elements * item
            else:
                is_near = (part, device.node) in on_node
                asked[part, device.node if is_near else None] += elements * item
                loads.received["node" if is_near else "network"][device] += elements * item
    for (part, near), num_bytes in asked.items():
        givers = holders[part] if near is None else on_node[part, near]
        for giver in givers:
            loads.sent["network" if near is None else "node"][giver] += num_bytes / len(givers)
    return loads


def _parts_held(at: Coordinate, instance: ModelInstance, sizes: ModelSizes) -> set[_Part]:
    """Return the parts that a device at a coordinate of an instance can send."""
    stage, part, strategy = at.pp, at.tp, instance.strategy
    experts, columns = experts_held(instance.engine, strategy, at)
    keys_part = _keys_part(part * min(strategy.tp, sizes.kv_heads) // strategy.tp)
    held: set[_Part] = {(stage, part), (stage, _UNSPLIT), (stage, keys_part)}
    if sizes.num_experts:
        held.add((stage, columns.number, experts.number))
    return held | {(_TABLE, part)} if stage in (0, strategy.pp - 1) else held


def _needed(at: Coordinate, giving: ModelInstance, taking: ModelInstance, sizes: ModelSizes) -> Mapping[_Part, float]:
    """Return the elements that a coordinate of the target takes from each part of the source: of trained weights."""
    taken: dict[_Part, float] = {}
    layer, stage, part, source, target = sizes.moved_layer, at.pp, at.tp, giving.strategy, taking.strategy
    of_target, of_source = (min(strategy.tp, sizes.kv_heads) for strategy in (target, source))
    of_experts = _experts_shared(at, giving, taking) if sizes.moved_experts else {}
    for other, (layers, split, whole) in _shared_stages(stage, source.pp, target.pp, sizes).items():
        for giver, share in _overlaps(part, target.tp, source.tp).items():
            taken[other, giver] = share * (layers * (layer.split - layer.keys_and_values) + split)
        for giver, share in _overlaps(part * of_target // target.tp, of_target, of_source).items():
            taken[other, _keys_part(giver)] = share * layers * layer.keys_and_values
        for (column, expert), share in of_experts.items():
            taken[other, column, expert] = share * layers * sizes.moved_experts
        taken[other, _UNSPLIT] = layers * layer.whole + whole
    if _shares_table(sizes) and stage in (0, target.pp - 1):
        for giver, share in _overlaps(part, target.tp, source.tp).items():
            taken[_TABLE, giver] = share * sizes.table
    return {key: elements for key, elements in taken.items() if elements}


def _experts_shared(at: Coordinate, giving: ModelInstance, taking: ModelInstance) -> Mapping[tuple[int, int], float]:
    """Return the share of all experts that a coordinate takes of each (columns, experts) part of a source."""
    experts, columns = experts_held(taking.engine, taking.strategy, at)
    their_experts, their_columns = experts_held(giving.engine, giving.strategy, Coordinate(0, 0, 0))
    return {
        (column, expert): share * of_these
        for column, share in _overlaps(*columns, their_columns.of).items()
        for expert, of_these in _overlaps(*experts, their_experts.of).items()
    }


def _keys_part(index: int) -> int:
    """Return the substitute for a tp part for the index-th part of keys and values, which may have fewer parts.

    >>> [_keys_part(index) for index in range(3)]
    [-2, -3, -4]
    """
    return _UNSPLIT - 1 - index


def _shared_stages(stage: int, source_pp: int, target_pp: int, sizes: ModelSizes) -> dict[int, tuple[int, int, int]]:
    """Return, for each source stage with something of the target's, the number of layers and `_shared_ends`."""
    target = stages(sizes.num_layers, target_pp)[stage]
    shared = {}
    for other, source in enumerate(stages(sizes.num_layers, source_pp)):
        layers = max(0, min(target.stop, source.stop) - max(target.start, source.start))
        split, whole = _shared_ends(stage, target_pp, other, source_pp, sizes)
        further = set(sizes.on_stage(sizes.further, target_pp, stage)) if sizes.further else set()
        for parameter in further.intersection(sizes.on_stage(sizes.further, source_pp, other)):
            split += parameter.num_elements if parameter.split_axis is not None else 0
            whole += parameter.num_elements if parameter.split_axis is None else 0
        if layers or split or whole:
            shared[other] = layers, split, whole
    return shared


def _shared_ends(stage: int, pp: int, other: int, other_pp: int, sizes: ModelSizes) -> tuple[int, int]:
    """Return the shared elements of the model's ends: those that tp splits, and the others.

    The first stages share the embedding, the last the norm and the head; a table that both stages hold is left out.
    """
    split = whole = 0
    last, other_last = stage == pp - 1, other == other_pp - 1
    if last and other_last and "scalar" in sizes.head:
        whole += sizes.hidden
    if sizes.adapter:  # the base stays where it is
        return split, whole
    if stage == 0 and other == 0 and not _shares_table(sizes):
        split += sizes.table
    if last and other_last:
        whole += sizes.hidden
        if "lm" in sizes.head and not sizes.tied:
            split += sizes.table
    return split, whole


def _shares_table(sizes: ModelSizes) -> bool:
    """Whether the embedding is the output's table too, so that any device of the first or last stage may give it."""
    return sizes.tied and "lm" in sizes.head and not sizes.adapter


def _overlaps(index: int, degree: int, other_degree: int) -> Mapping[int, float]:
    """Return, for each of `other_degree` equal parts that overlaps the index-th of `degree`, the share in both.

    >>> dict(_overlaps(0, 2, 4)), dict(_overlaps(3, 4, 2))
    ({0: 0.25, 1: 0.25}, {1: 0.25})
    """
    shares = {}
    for other in range(index * other_degree // degree, -(-(index + 1) * other_degree // degree)):
        low, high = max(index / degree, other / other_degree), min((index + 1) / degree, (other + 1) / other_degree)
        if high > low:
            shares[other] = high - low
    return shares
