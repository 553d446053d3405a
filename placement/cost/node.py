"""How long each node of an augmented graph takes under a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import assert_never

from prefect_rlhf.placement.augmented.node import Node, subject_of
from prefect_rlhf.placement.augmented.work import (
    Checkpoint,
    Commit,
    Compute,
    Export,
    Follow,
    HostCopy,
    ModelCall,
    Reallocate,
    Reload,
    Transfer,
)
from prefect_rlhf.placement.cost.call_bytes import static_bytes
from prefect_rlhf.placement.cost.contention import Demand, SlowDown, working_share
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.moves import (
    disk_seconds,
    host_seconds,
    reallocation_seconds,
    transfer_seconds,
)
from prefect_rlhf.placement.cost.seconds import Seconds
from prefect_rlhf.placement.cost.sizes import ModelSizes, copied_bytes, instance_copied_bytes
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.uneven import placed_cost
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.models.engine_constants import MAIN_WEIGHT_BYTES
from prefect_rlhf.placement.plan import ExecutionPlan, ModelInstance, trained_instance
from prefect_rlhf.placement.rows.moves import placed_moves
from prefect_rlhf.placement.rows.partition import Part

_SLOWED_MOVES = Transfer | Reallocate | Follow | HostCopy | Checkpoint
"""Moves that share their hosts as a profile has measured; moves to disk are not among them."""


@dataclass(frozen=True, slots=True)
class NodeCosts:
    """How long each node of `graph` takes under `plan`, in seconds.

    Computations on data and exports of models count only as orchestration, because no source of times covers them. A
    host call takes as long as its author expects.
    """

    graph: DataflowGraph
    plan: ExecutionPlan
    workload: Workload
    sources: CostSources
    _costs: dict[tuple[str, bool], Seconds] = field(
        default_factory=dict, init=False, repr=False, compare=False, hash=False
    )

    def seconds(self, node: Node) -> float:
        """Return a node's total time in seconds."""
        return self.cost(node).total

    def worked_seconds(self, node: Node) -> float | None:
        """Return the seconds that the node's ranks work, without orchestration; None without a source of times."""
        return None if isinstance(node.work, Compute | Export) else self.cost(node).worked

    def cost(self, node: Node) -> Seconds:
        """Return a node's time by cause, in seconds. It is equal in every step, except for copies to the host and
        drops.
        """
        key = subject_of(node.id), isinstance(node.work, HostCopy) and node.work.copies
        if key not in self._costs:
            self._costs[key] = self._cost(node)
        return self._costs[key]

    def host_bytes(self, copy: HostCopy) -> int:
        """Return how many bytes the fullest device copies to or from its host; 0 without `copies`.

        They are the weights, the optimizer states of a trained instance, or both. Gradients are restored as zeros.
        """
        if not copy.copies:
            return 0
        instance = copy.instance
        trained = instance == trained_instance(self.graph, self.plan, instance.role)
        execution = Execution(instance.strategy)
        by_stage = (
            static_bytes(execution, self._sizes(instance.role), trained, stage)
            for stage in {0, instance.strategy.pp - 1}
        )
        return max(
            (static.optimizer if copy.part != "weights" else 0) + (static.weights if copy.part != "optimizer" else 0)
            for static in by_stage
        )

    def demand(self, node: Node) -> Demand:
        """Return the load that a node puts on its hosts; for data moves and work behind the steps it is unknown, and
        0.
        """
        cost, devices = self.cost(node), _devices_on_hosts(node)
        share = cost.worked / cost.total if cost.total else 0.0
        if not isinstance(node.work, ModelCall):
            return Demand(devices, share if isinstance(node.work, _SLOWED_MOVES) else 0.0, self._slow_down(node))
        working = working_share(cost)
        return Demand({host: working * count for host, count in devices.items()}, share, self._slow_down(node))

    def _slow_down(self, node: Node) -> SlowDown | None:
        """The slow-down of a node by other work on its hosts, taken from its first kind of device."""
        hardware, work = self.sources.hardware(node.meshes[0])[0], node.work
        if isinstance(work, ModelCall):
            return self.sources.slow_down(work.kind, work.instance.engine, hardware, self._sizes(work.instance.role))
        return self.sources.slow_down("move", "megatron", hardware) if isinstance(work, _SLOWED_MOVES) else None

    def _cost(self, node: Node) -> Seconds:
        cost = self._alone(node)
        if isinstance(node.work, ModelCall):
            return cost
        if (slow_down := self._slow_down(node)) is not None:
            cost = cost._replace(transfer=cost.transfer * slow_down.factor(max(_devices_on_hosts(node).values())))
        return cost + Seconds(orchestration=self.sources.orchestration_seconds)

    def _alone(self, node: Node) -> Seconds:
        """The time of a call, or of other work, in seconds, if each of its devices were alone on its host."""
        match node.work:
            case ModelCall(call, _, _, part):
                return self._call(call, part)
            case Compute(call):
                return Seconds(call=call.host_seconds or 0.0)
            case Transfer(call, moves, part):
                placed, links = placed_moves(self.graph, self.plan, call.name, moves), self.sources.links(node.meshes)
                return Seconds(transfer=transfer_seconds(placed, part, self.workload, links))
            case Reallocate(source, target):
                sizes = self._sizes(source.role)
                moved = reallocation_seconds(source, target, sizes, self.sources.links(node.meshes))
                return Seconds(transfer=moved, call=self.sources.taken_seconds(target, sizes))
            case Follow(source, target):
                return self._follow(node, source, target)
            case HostCopy(instance, part):
                written = isinstance(node.work, Reload) and part == "all" and node.work.copies
                return Seconds(
                    transfer=host_seconds(self.host_bytes(node.work), self.sources.links(node.meshes)),
                    call=self.sources.written_seconds(instance, self._sizes(instance.role)) if written else 0.0,
                )
            case Checkpoint(instance):
                by_device = instance_copied_bytes(instance, self._sizes(instance.role))
                return Seconds(transfer=host_seconds(max(by_device.values()), self.sources.links(node.meshes)))
            case Commit():
                return Seconds(transfer=disk_seconds(max(copied_bytes(self.graph, self.plan).values())))
            case Export():
                return Seconds()
            case _:
                assert_never(node.work)

    def _follow(self, node: Node, source: ModelInstance, target: ModelInstance) -> Seconds:
        """The seconds of a move, and of reading and writing the averages in the memory of the fullest device."""
        sizes, own, links = self._sizes(source.role), self._sizes(target.role), self.sources.links(node.meshes)
        touched = own.most_trained(target.strategy) * (2 * MAIN_WEIGHT_BYTES + own.item + sizes.item)
        return Seconds(
            transfer=reallocation_seconds(source, target, sizes, links) + links.seconds(touched, "device"),
            call=self.sources.taken_seconds(target, own),
        )

    def _call(self, call: Call, part: Part) -> Seconds:
        """The time of a call's part in seconds: as a separate call, but no less than its share of the whole call.

        So an estimate never gains by fewer rows at once, and the parts together take no less than the whole. The first
        part has the cost of new weights.
        """
        own = self._rows_cost(call.cut(part.of), new_weights=part.index == 0)
        if part.of == 1:
            return own
        without = own if part.index else self._rows_cost(call.cut(part.of), new_weights=False)
        share = self._rows_cost(call, new_weights=False).times(1 / part.of)
        return own + Seconds(call=max(0.0, share.total - without.total))

    def _rows_cost(self, call: Call, new_weights: bool) -> Seconds:
        sizes, placement = self._sizes(call.role or ""), self.plan[call.name]
        speeds = self.plan.cluster.node_speeds

        def cost() -> Seconds:
            work = replace(CallWork.expected(call, self.workload), new_weights=new_weights)
            return placed_cost(work, sizes, placement, self.sources, speeds)

        return self.sources.kept((call, sizes, new_weights, self.workload, placement, speeds), cost)

    def _sizes(self, role: str) -> ModelSizes:
        return ModelSizes.of(self.graph.model(role))


def _devices_on_hosts(node: Node) -> dict[int, float]:
    """How many devices a node has on each host."""
    return {host: float(count) for host, count in Counter(device.node for device in node.devices).items()}
