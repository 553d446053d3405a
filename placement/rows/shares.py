"""Which rows of which keys each device holds and needs, and what must go from device to device.

Rows are numbered 0..num_rows-1 within a step, whatever the plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType

from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.mesh import Device
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, Placement
from prefect_rlhf.placement.rows.partition import RowIndices, RowPartition
from prefect_rlhf.placement.strategy import Coordinate, Strategy

LengthsByCall = Mapping[str, tuple[int, ...]]
"""Tokens of each row of a step, by the generate that made them."""


@dataclass(frozen=True, slots=True)
class RowShare:
    """The rows of one replica: known once lengths are, but equal shares are equal rows whatever the lengths."""

    dealing: RowPartition
    replica: int

    def rows(self, lengths: LengthsByCall | None = None) -> RowIndices:
        """Its rows, mini-batch by mini-batch. Without `lengths` (a plan is being made): as if all were equally long."""
        return tuple(row for batch in self.mini_batches(lengths) for row in batch)

    def mini_batches(self, lengths: LengthsByCall | None = None) -> tuple[RowIndices, ...]:
        """The same, by the mini-batches of its dealing."""
        source = self.dealing.lengths_of
        known = None if lengths is None or source is None else lengths[source]
        return self.dealing.hands(known)[self.replica]

    def mini_batch_sizes(self, mini_batches: int, lengths: LengthsByCall | None = None) -> tuple[int, ...]:
        """How many of its rows are in each of so many mini-batches; those of its dealing may be finer."""
        sizes = [len(batch) for batch in self.mini_batches(lengths)]
        if len(sizes) < mini_batches:  # one replica has whole mini-batches
            return (sum(sizes) // mini_batches,) * mini_batches
        finer = len(sizes) // mini_batches
        return tuple(sum(sizes[start : start + finer]) for start in range(0, len(sizes), finer))

    def surely_within(self, shares: Sequence[RowShare]) -> bool:
        """Whether some of `shares` together have all its rows, however long rows turn out to be."""
        if any(share == self or share.dealing.whole for share in shares):
            return True
        if self.dealing.lengths_of is not None:
            return False
        known = (share for share in shares if share.dealing.lengths_of is None)
        return set(self.rows()) <= {row for share in known for row in share.rows()}


@dataclass(frozen=True, slots=True)
class Need:
    """What a call reads on one device: these keys of its inputs, for its replica's rows."""

    share: RowShare
    keys: frozenset[str]


def dealing_of(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> RowPartition:
    """How a call's rows are dealt: calls on the same rows with the same dp and speeds deal alike, so nothing moves.

    All calls on the same rows use the finest mini-batches that any train_step cuts them into, so that inference and
    train_step agree. Rows that a generate made are dealt by tokens; its own, and those of a dataset, by count.
    """
    call, placement = graph.call(name), plan[name]
    if call.kind == "compute" or placement.strategy.dp == 1:
        return RowPartition(call.num_rows)
    origin = origin_of(graph, call)
    kin = [other for other in graph if other.kind != "compute" and _same_rows(graph, call, other)]
    width = math.lcm(*(other.rows_per_item for other in kin))
    finest = math.lcm(*(other.mini_batches for other in kin))
    dealable = call.num_rows % (finest * width) == 0 and call.num_rows // (finest * width) >= placement.strategy.dp
    return RowPartition(
        call.num_rows,
        replica_speeds(placement, plan.cluster.node_speeds),
        finest if dealable else call.mini_batches,
        width if dealable else call.rows_per_item,
        origin if origin != name and knows_lengths(graph, call) else None,
    )


def origin_of(graph: DataflowGraph, call: Call) -> str:
    """Where the tokens of a call's rows come from: itself when it is a generate, a generate, or a dataset."""
    if call.kind == "generate":
        return call.name
    return next((port.source for port in call.inputs if "tokens" in port.keys), call.rows_from)


def knows_lengths(graph: DataflowGraph, call: Call) -> bool:
    """Whether the controller knows the lengths of the call's rows before it runs: a generate reported them."""
    origin = origin_of(graph, call)
    return origin != call.name and any(c.name == origin and c.kind == "generate" for c in graph)


def replica_speeds(placement: Placement | ModelInstance, of_node: Sequence[float]) -> tuple[float, ...]:
    """The speed of each replica, that of its slowest device, in parts of the fastest replica's."""
    if not of_node:
        return (1.0,) * placement.strategy.dp
    slowest = [math.inf] * placement.strategy.dp
    for device, at in _coordinates(placement):
        slowest[at.dp] = min(slowest[at.dp], of_node[device.node])
    return tuple(speed / max(slowest) for speed in slowest)


def needs(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> Mapping[Device, Need]:
    """What each device of a call works on: its replica's rows, and of their keys those that its stage uses."""
    return _needs(_placed(graph, plan, name))


def holds(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> Mapping[Device, RowShare]:
    """Whose rows of the call's outputs each device holds once it has run.

    generate: every device of the replica. inference: the replica's device of the last pipeline stage with tp
    coordinate 0. compute: its one device. train_step: none.
    """
    return _holds(_placed(graph, plan, name))


def reads(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> dict[str, tuple[str, ...]]:
    """The calls whose rows `name` reads, each with the keys that some device of it uses."""
    used = frozenset[str]().union(*(need.keys for need in needs(graph, plan, name).values()))
    every = graph.reads_of(name).items()
    return {producer: tuple(key for key in keys if key in used) for producer, keys in every}


@dataclass(frozen=True, slots=True)
class _Placed:
    """All of a call and a plan that decides which rows and keys its devices need, and hold once it has run.

    `staged`: whether its pipeline stages use different keys. Plans that differ in other calls have equal ones, which
    are worked out once: who searches, certifies or times plans asks for the same again and again.
    """

    call: Call
    placement: Placement
    dealing: RowPartition
    staged: bool


def _placed(graph: DataflowGraph, plan: ExecutionPlan, name: str) -> _Placed:
    call = graph.call(name)
    staged = call.kind in ("inference", "train_step") and knows_lengths(graph, call)
    return _Placed(call, plan[name], dealing_of(graph, plan, name), staged)


@lru_cache(maxsize=256)
def _needs(of: _Placed) -> Mapping[Device, Need]:
    every = frozenset(key for port in of.call.inputs for key in port.keys)

    @cache  # devices of one replica and stage need the same
    def need(replica: int, stage: int) -> Need:
        keys = _stage_keys(of.call, stage, of.placement.strategy, every) if of.staged else every
        return Need(RowShare(of.dealing, 0 if of.dealing.whole else replica), every & keys)

    return MappingProxyType({device: need(at.dp, at.pp) for device, at in _coordinates(of.placement)})


@lru_cache(maxsize=256)
def _holds(of: _Placed) -> Mapping[Device, RowShare]:
    kind, needed = of.call.kind, _needs(of)
    makers = (
        device
        for device, at in _coordinates(of.placement)
        if kind != "train_step" and (kind != "inference" or _gives_output(at, of.placement.strategy))
    )
    return MappingProxyType({device: needed[device].share for device in makers})


def _coordinates(placement: Placement | ModelInstance) -> Iterator[tuple[Device, Coordinate]]:
    return zip(placement.devices, placement.strategy.coordinates(), strict=True)


def _same_rows(graph: DataflowGraph, call: Call, other: Call) -> bool:
    def rows(of: Call) -> tuple[str, int, int | None]:
        return origin_of(graph, of), of.num_rows, of.every

    return rows(call) == rows(other)


def _gives_output(at: Coordinate, strategy: Strategy) -> bool:
    return at.pp == strategy.pp - 1 and at.tp == 0


def _stage_keys(call: Call, stage: int, strategy: Strategy, every: frozenset[str]) -> frozenset[str]:
    """The first stage embeds tokens; the last one picks outputs, and has the loss, which may look at every column.

    Every stage must know how long rows are; where the controller does, it says so with the order.
    """
    keys: frozenset[str] = frozenset({"tokens"} if stage == 0 else ())
    if stage < strategy.pp - 1:
        return keys
    if call.kind == "train_step":
        return every
    if "logprobs" in call.outputs:
        return keys | {"tokens", "prompt_length"}
    return keys | {"prompt_length"} if "values" in call.outputs else keys
