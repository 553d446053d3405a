"""Seconds of every node of an augmented graph under a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prefect_rlhf.placement.augmented.node import Node
from prefect_rlhf.placement.cost.call_bytes import static_bytes
from prefect_rlhf.placement.cost.contention import Demand, SharedWork, SlowDown, working_share
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.moves import (
    disk_seconds,
    host_seconds,
    reallocation_seconds,
    transfer_seconds,
)
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.state_bytes import copied_bytes, instance_copied_bytes
from prefect_rlhf.placement.cost.uneven import placed_cost
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, trained_instance
from prefect_rlhf.placement.rows.moves import row_transfers

_CALLS = ("generate", "inference", "train_step")
_MOVES = ("transfer", "reallocate", "offload", "reload", "checkpoint", "commit")
_SLOWED_MOVES = ("transfer", "reallocate", "offload", "reload", "checkpoint")
"""Those of which a profile knows how they share their hosts: none that goes to disk."""


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """The seconds of each node of `graph` under `plan`.

    No source of times knows computations on data and the export of models: orchestration is all that they count as. A
    call on hosts takes as long as its author expects.
    """

    graph: DataflowGraph
    plan: ExecutionPlan
    workload: Workload
    sources: CostSources
    _costs: dict[tuple[object, ...], Seconds] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def seconds(self, node: Node) -> float:
        """Return the seconds of a node, in all."""
        return self.cost(node).total

    def worked_seconds(self, node: Node) -> float | None:
        """Return the seconds that its ranks work on it, without orchestration; None without a source of times."""
        return self.cost(node).worked if node.kind in (*_CALLS, *_MOVES) else None

    def cost(self, node: Node) -> Seconds:
        """Return the seconds of a node, by cause; the same in every step."""
        call = node.call.name if node.call else None
        key = (node.kind, call, node.instance, node.source, node.target, node.moves, node.part)
        if key not in self._costs:
            if node.kind in _CALLS:
                self._costs[key] = self._call(node)
            else:
                self._costs[key] = self._move(node) + Seconds(orchestration=self.sources.orchestration_seconds)
        return self._costs[key]

    def demand(self, node: Node) -> Demand:
        """Return the load of a node on its hosts; for data moves and work behind the steps it is unknown and 0."""
        cost, devices = self.cost(node), _devices_on_hosts(node)
        share = cost.worked / cost.total if cost.total else 0.0
        if node.kind not in _CALLS:
            return Demand(devices, share if node.kind in _SLOWED_MOVES else 0.0, self._slow_down(node))
        working = working_share(cost)
        return Demand({host: working * count for host, count in devices.items()}, share, self._slow_down(node))

    def _slow_down(self, node: Node) -> SlowDown | None:
        """The slow-down of a node by other work on its hosts, taken from its first kind of device."""
        hardware = self.sources.hardware(node.meshes[0])[0]
        if node.kind in _CALLS:
            assert node.call is not None and node.call.role is not None and node.instance is not None  # has a model
            work: SharedWork = node.call.kind  # type: ignore[assignment]  # a member of _CALLS
            return self.sources.slow_down(work, node.instance.engine, hardware, self._sizes(node.call.role))
        return self.sources.slow_down("move", "megatron", hardware) if node.kind in _SLOWED_MOVES else None

    def _move(self, node: Node) -> Seconds:
        cost, slow_down = self._alone(node), self._slow_down(node)
        if slow_down is None:
            return cost
        return cost._replace(transfer=cost.transfer * slow_down.factor(max(_devices_on_hosts(node).values())))

    def _alone(self, node: Node) -> Seconds:
        """The seconds of a node that is no model function call, if each of its devices were alone on its host."""
        if node.kind == "compute" and node.call is not None and node.call.host_seconds is not None:
            return Seconds(call=node.call.host_seconds)
        if node.kind not in _MOVES:
            return Seconds()
        if node.kind == "commit":
            return Seconds(transfer=disk_seconds(max(copied_bytes(self.graph, self.plan).values())))
        links = self.sources.links(node.meshes)
        if node.kind == "transfer":
            assert node.call is not None  # a transfer feeds a call
            transfers = row_transfers(self.graph, self.plan, node.call.name, node.moves)
            return Seconds(transfer=transfer_seconds(transfers, self.workload, links))
        if node.kind == "reallocate":
            assert node.source is not None and node.target is not None  # set for every reallocate
            sizes = self._sizes(node.source.role)
            moved = reallocation_seconds(node.source, node.target, sizes, links)
            return Seconds(transfer=moved, call=self.sources.written_seconds(node.target, sizes))
        assert node.instance is not None  # set for the others
        if node.kind == "checkpoint":
            by_device = instance_copied_bytes(node.instance, self._sizes(node.instance.role))
            return Seconds(transfer=host_seconds(max(by_device.values()), links))
        copied = Seconds(transfer=host_seconds(self._offloaded_bytes(node.instance, node.part == "all"), links))
        if node.kind == "offload" or node.part != "all":
            return copied
        return copied + Seconds(call=self.sources.written_seconds(node.instance, self._sizes(node.instance.role)))

    def _call(self, node: Node) -> Seconds:
        assert node.call is not None and node.placement is not None and node.call.role is not None  # has a model
        work = CallWork.expected(node.call, self.workload)
        sizes, speeds = self._sizes(node.call.role), self.plan.cluster.node_speeds
        return placed_cost(work, sizes, node.placement, self.sources, speeds)

    def _sizes(self, role: str) -> ModelSizes:
        return ModelSizes.of(self.graph.model(role))

    def _offloaded_bytes(self, instance: ModelInstance, whole: bool) -> int:
        """Return the bytes that the fullest device copies: optimizer states if trained, weights if all of it moves.

        Gradients are restored as zeros, so they are not copied.
        """
        trained = instance == trained_instance(self.graph, self.plan, instance.role)
        execution = Execution(instance.strategy)
        by_stage = (
            static_bytes(execution, self._sizes(instance.role), trained, stage)
            for stage in {0, instance.strategy.pp - 1}
        )
        return max(static.optimizer + (static.weights if whole else 0) for static in by_stage)


def _devices_on_hosts(node: Node) -> dict[int, float]:
    """How many devices a node has on each host."""
    return {host: float(count) for host, count in Counter(device.node for device in node.devices).items()}
