"""The rows and keys that each device needs for a call, and holds after it.

Rows are numbered 0..num_rows-1 within a step, under every plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import MappingProxyType

from prefect_rlhf.placement.devices.hashed_once import HashedOnce, hashed_once
from prefect_rlhf.placement.devices.mesh import Device
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.models.outputs import OUTPUTS
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, Placement, device_coordinates
from prefect_rlhf.placement.row_set import RowSet
from prefect_rlhf.placement.rows.partition import WHOLE, Part, RowIndices, RowPartition

ToldByCall = Mapping[str, tuple[int, ...]]
"""What a step's calls reported about its rows: a generate, each row's tokens; a choice, the chosen rows' numbers."""


@hashed_once
@dataclass(frozen=True, slots=True)
class RowShare(HashedOnce):
    """A replica's rows. They are known once lengths and selections are; equal shares always have equal rows.

    With `rows_each`, they are the source rows, from each of which `rows_each` rows were made. With `children`, they are
    the rows made from these rows, this many from each.
    """

    partition: RowPartition
    replica: int
    rows_each: int = 1
    children: int = 1

    def rows(self, told: ToldByCall | None = None, part: Part = WHOLE) -> RowIndices:
        """Return the replica's rows of a part, by mini-batch; until it is `told`, as if rows were equally long and all
        kept.

        The rows of a part depend only on the lengths of its own rows and of rows in earlier parts.
        """
        batches = self.mini_batches(told)
        rows = tuple(
            row for batch in batches[part.within(len(batches)) if part.of > 1 else slice(None)] for row in batch
        )
        if self.children > 1:
            return tuple(child for row in rows for child in range(row * self.children, (row + 1) * self.children))
        return rows if self.rows_each == 1 else tuple(dict.fromkeys(row // self.rows_each for row in rows))

    def mini_batches(self, told: ToldByCall | None = None) -> tuple[RowIndices, ...]:
        """Return the replica's rows in each mini-batch of its partition; see `rows`."""
        generate, choice = self.partition.lengths_of, self.partition.kept_by
        lengths = None if told is None or generate is None else told[generate]
        kept = None if told is None or choice is None else told[choice]
        return self.partition.partitions(lengths, kept)[self.replica]

    def mini_batch_sizes(self, mini_batches: int, told: ToldByCall | None = None) -> tuple[int, ...]:
        """Count the replica's rows in each of `mini_batches` mini-batches; its partition may have finer
        mini-batches.
        """
        sizes = [len(batch) for batch in self.mini_batches(told)]
        finer = len(sizes) // mini_batches
        return tuple(sum(sizes[start : start + finer]) for start in range(0, len(sizes), finer))

    def surely_within(self, shares: Sequence[RowShare]) -> bool:
        """Whether `shares` together contain all its rows, whatever the lengths and the selected rows."""
        own = self.partition
        if any(
            share == self or (share.partition.whole and share.partition.kept_by in (None, own.kept_by))
            for share in shares
        ):
            return True
        if own.lengths_of is not None or own.kept_by is not None:
            return False
        by_count = (share for share in shares if share.partition.lengths_of is None and share.partition.kept_by is None)
        return set(self.rows()) <= {row for share in by_count for row in share.rows()}


def reading(own: RowSet, source: RowSet) -> Callable[[RowShare], RowShare]:
    """Return a function that takes a share of `own` and returns the rows of `source` that it reads.

    These are the rows that its rows were made from, or their children. The row sets are compared here, once for all
    replicas.
    """
    children = own.children(source)
    rows_each = 1 if children > 1 else own.per_row(source)
    if children == rows_each == 1:
        return lambda share: share
    return lambda share: replace(
        share, rows_each=share.rows_each * rows_each, children=children if children > 1 else share.children
    )


@hashed_once
@dataclass(frozen=True, slots=True)
class Need(HashedOnce):
    """A call's input on a device: these keys, for its replica's rows."""

    share: RowShare
    keys: frozenset[str]


@hashed_once
@dataclass(frozen=True, slots=True)
class PlacedCall(HashedOnce):
    """Everything in a call and a plan that decides which rows and keys its devices need, and hold after it.

    `staged` says whether its pipeline stages use different keys. Plans that differ only in other calls, or in words
    such as micro-batches, have equal values, which are computed once: search, certificate and estimate request them
    again and again.
    """

    call: Call
    placement: Placement
    """Only where it runs: words such as micro-batches have their default."""
    partition: RowPartition
    staged: bool

    def needs(self) -> Mapping[Device, Need]:
        """Return the rows that each device works on, with the keys that its stage uses."""
        return _needs(self)

    def devices_by_need(self) -> Mapping[Need, Sequence[Device]]:
        """Group devices by their need."""
        return _devices_by_need(self)

    def rows_at_once(self, part: Part = WHOLE) -> tuple[int, ...]:
        """Count the rows in each replica's fullest mini-batch, or in a part, before lengths and choices are known."""
        return _rows_at_once(self, part)

    def rows_held(self) -> Mapping[Device, RowShare]:
        """Return the rows of the call's outputs that each device holds after it.

        After a generate, every device of the replica holds them; after an inference, the replica's device with tp
        coordinate 0 on the last pipeline stage; after a compute, its device; after a train_step, no device.
        """
        return _rows_held(self)


@lru_cache(maxsize=4096)  # every move of rows in every step of a plan asks for the same
def placed_by_row_set(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> tuple[PlacedCall, ...]:
    """Return a call on each of its row sets, as placed by a plan."""
    return tuple(_placed(graph, plan, part) for part in graph.call(name).by_row_set)


def placed_call(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> PlacedCall:
    """Return a call as placed by a plan, on the first of its row sets. A call that makes rows has no other row set."""
    return placed_by_row_set(graph, plan, name)[0]


def most_rows(graph: DataflowGraph, plan: ExecutionPlan, calls: Iterable[Call]) -> tuple[int, ...]:
    """Return the most rows that each of an instance's replicas has at once, over all parts of its `calls`.

    The certificate counts vLLM's cache for these rows, and the engine allocates it. A replica without rows still has
    room for a row.
    """
    dealt: list[tuple[int, ...]] = []
    for call in calls:
        placed, parts = placed_call(graph, plan, call.name), plan.parts(call.name)
        dealt += [placed.rows_at_once(Part(index, parts)) for index in range(parts)]
    return tuple(max(1, *of_replica) for of_replica in zip(*dealt, strict=True))


def rows_held(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> Mapping[Device, RowShare]:
    """Return the rows of the call's outputs that each device holds once it has run; see PlacedCall."""
    return placed_call(graph, plan, name).rows_held()


def reads(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> dict[str, tuple[str, ...]]:
    """Return the calls that `name` reads rows from, each with the keys that some device of it uses."""
    found: dict[str, tuple[str, ...]] = {}
    for placed in placed_by_row_set(graph, plan, name):
        for producer, keys in reads_on_row_set(graph, placed).items():
            found[producer] = tuple(dict.fromkeys((*found.get(producer, ()), *keys)))
    return found


def reads_on_row_set(graph: DataflowGraph, placed: PlacedCall) -> dict[str, tuple[str, ...]]:
    """Return the calls that a call reads rows from on a single row set, each with the keys that some device uses."""
    used = frozenset[str]().union(*(need.keys for need in placed.needs().values()))
    by_producer = graph.keys_read(placed.call).items()
    return {producer: tuple(key for key in keys if key in used) for producer, keys in by_producer}


def _placed(graph: DataflowGraph, plan: ExecutionPlan, part: Call) -> PlacedCall:
    staged = part.kind in ("inference", "train_step") and knows_lengths(graph, part)
    return PlacedCall(part, _without_words(plan[part.name]), _partition(graph, plan, part), staged)


@lru_cache(maxsize=4096)  # a single object, whose hash is computed once, for all requests
def _without_words(placement: Placement) -> Placement:
    return Placement(placement.mesh, placement.strategy, placement.engine, device_order=placement.device_order)


def partition_of(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> RowPartition:
    """Return the partition rule for a call's rows (the first of its row sets).

    Calls on the same rows with the same dp and speeds have the same rule, so no row moves between them. All calls on
    the same rows use the finest mini-batches of any train_step, and the parts of any call, so that inference and
    train_step agree, if there are enough items. A generate's rows are balanced by tokens for its readers; the generate
    itself, and a dataset's rows, are divided by count.
    """
    return _partition(graph, plan, graph.call(name).by_row_set[0])


def _partition(graph: DataflowGraph, plan: ExecutionPlan, call: Call) -> RowPartition:
    placement, kept_by = plan[call.name], call.rows.name if call.rows.choice else None
    if call.kind == "compute":
        return RowPartition(call.num_rows, kept_by=kept_by)
    mini_batches, rows_per_item = _cuts(graph, plan, call)
    by_tokens = placement.strategy.dp > 1 and knows_lengths(graph, call)
    speeds = replica_speeds(placement, plan.cluster.node_speeds)
    lengths_of = call.rows.numbered.name if by_tokens else None
    return RowPartition(call.num_rows, speeds, mini_batches, rows_per_item, lengths_of, kept_by)


def _cuts(graph: DataflowGraph, plan: ExecutionPlan, call: Call) -> tuple[int, int]:
    """Return the mini-batches and the rows per item of a call: a multiple of its parts, else equal under every plan."""
    same_rows = _on_rows_of(graph, call)
    width = math.lcm(*(other.rows_per_item for other in same_rows))
    finest = math.lcm(*(other.mini_batches for other in same_rows), *(plan.parts(other.name) for other in same_rows))
    num_items = call.num_rows // width
    if num_items < max(other.mini_batches for other in same_rows):
        return math.lcm(call.mini_batches, plan.parts(call.name)), call.rows_per_item
    own = math.lcm(call.mini_batches, plan.parts(call.name))
    return (finest if finest <= num_items else own), width


def num_groups(graph: DataflowGraph, call: Call) -> int:
    """Return how many groups a call's rows have, which no part divides: rows made from the same row, in whole items."""
    width = math.lcm(*(other.rows_per_item for other in _on_rows_of(graph, call)))
    return call.num_rows // math.lcm(width, call.rows.group_size)


def _on_rows_of(graph: DataflowGraph, call: Call) -> list[Call]:
    """Return the model calls on the rows of a call, each on these rows alone."""
    return [part for other in graph if other.kind != "compute" for part in other.by_row_set if part.rows == call.rows]


def knows_lengths(graph: DataflowGraph, call: Call) -> bool:
    """Whether the lengths of the call's rows are known before it runs, because the generate that made them reported
    them.
    """
    source = call.rows.numbered.name
    return call.kind != "generate" and any(other.kind == "generate" and other.name == source for other in graph)


def replica_speeds(placement: Placement | ModelInstance, node_speeds: Sequence[float]) -> tuple[float, ...]:
    """Return each replica's speed, which is that of its slowest device, relative to the fastest replica."""
    if not node_speeds:
        return _equal_speeds(placement.strategy.dp)
    slowest = [math.inf] * placement.strategy.dp
    for device, at in device_coordinates(placement):
        slowest[at.dp] = min(slowest[at.dp], node_speeds[device.node])
    return tuple(speed / max(slowest) for speed in slowest)


@cache
def _equal_speeds(dp: int) -> tuple[float, ...]:
    """A single object for each dp, so that equal partitions are compared at once."""
    return (1.0,) * dp


@lru_cache(maxsize=256)
def _needs(placed: PlacedCall) -> Mapping[Device, Need]:
    inputs = frozenset(key for port in placed.call.inputs for key in port.keys)

    @cache  # devices of the same replica and stage need the same rows
    def need(replica: int, stage: int) -> Need:
        keys = _stage_keys(placed.call, stage, placed.placement.strategy, inputs) if placed.staged else inputs
        return Need(RowShare(placed.partition, 0 if placed.partition.whole else replica), inputs & keys)

    return MappingProxyType({device: need(at.dp, at.pp) for device, at in device_coordinates(placed.placement)})


@lru_cache(maxsize=256)
def _devices_by_need(placed: PlacedCall) -> Mapping[Need, Sequence[Device]]:
    devices: dict[Need, list[Device]] = defaultdict(list)
    for device, need in _needs(placed).items():
        devices[need].append(device)
    return MappingProxyType({need: tuple(same) for need, same in devices.items()})


@lru_cache(maxsize=256)
def _rows_at_once(placed: PlacedCall, part: Part) -> tuple[int, ...]:
    shares = [RowShare(placed.partition, replica) for replica in range(placed.partition.dp)]
    if part.of > 1:  # a part is not trained on
        return tuple(len(share.rows(part=part)) for share in shares)
    return tuple(max(share.mini_batch_sizes(placed.call.mini_batches)) for share in shares)


@lru_cache(maxsize=256)
def _rows_held(placed: PlacedCall) -> Mapping[Device, RowShare]:
    kind, last_stage, needed = placed.call.kind, placed.placement.strategy.pp - 1, _needs(placed)
    makers = (
        device
        for device, at in device_coordinates(placed.placement)
        if kind != "train_step" and (kind != "inference" or (at.pp == last_stage and at.tp == 0))
    )
    return MappingProxyType({device: needed[device].share for device in makers})


def _stage_keys(call: Call, stage: int, strategy: Strategy, inputs: frozenset[str]) -> frozenset[str]:
    """Return the keys that a stage uses.

    The first stage embeds tokens; the last stage picks outputs and computes the loss, which may read every column.
    Every stage must know the lengths of rows; if the controller knows them, the command states them.
    """
    keys: frozenset[str] = frozenset({"tokens"} if stage == 0 else ())
    if stage < strategy.pp - 1:
        return keys
    if call.kind == "train_step":
        return inputs
    outputs = [OUTPUTS[name] for name in call.outputs if name in OUTPUTS]
    if any(output.reads_tokens for output in outputs):
        return keys | {"tokens", "prompt_length"}
    return keys | {"prompt_length"} if any(output.per == "token" for output in outputs) else keys
