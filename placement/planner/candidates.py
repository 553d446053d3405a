"""Every way in which a call may run on each class of meshes, with its time and bytes: what a plan chooses from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_rlhf.placement.cost.call_bytes import call_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.uneven import different_works, least_cost
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.memory.bytes import usable_bytes
from prefect_rlhf.placement.mesh import DeviceMesh
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.planner.mesh_space import MeshSpace
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.plans.check import ENGINES, violations
from prefect_rlhf.placement.schedule.estimate import training
from prefect_rlhf.placement.strategy import Strategy, strategies

GIB = 1 << 30
ENOUGH_MICRO_BATCHES = 64  # for time; more only where memory asks for them


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Bytes on one device: those that stay, and with what comes and goes while the call runs."""

    static: int
    peak: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """`placement` on the first mesh of `mesh_class`. `host_seconds`: to offload, and again to reload, what it offloads.

    A device holds `least.static` bytes or more all the time, and `least.peak` or more while the call runs; the fullest
    one holds those of `most`, which count what is offloaded as if it never left: it may be on its way while others run.
    """

    placement: Placement
    mesh_class: int
    seconds: float
    host_seconds: float
    least: MemoryBounds
    most: MemoryBounds


Candidates = Mapping[str, tuple[Candidate, ...]]
"""Of each call, by its name."""


@dataclass(frozen=True, slots=True)
class CostContext:
    """All that the candidates of a question are counted by.

    `graph` has the calls that run in every iteration, `space` the meshes that they may have. `execution` says how
    engines run a call, by default ours.
    """

    question: Question
    graph: DataflowGraph
    space: MeshSpace
    execution: Callable[[Placement], Execution] = Execution.of

    @classmethod
    def of(cls, question: Question, execution: Callable[[Placement], Execution] = Execution.of) -> CostContext:
        """Return the context of a question about all meshes of its site."""
        site = question.site
        space = MeshSpace.of(site.cluster, site.mesh, site.sources)
        return cls(question, training(question.graph), space, execution)

    @property
    def site(self) -> Site:
        return self.question.site

    def usable_bytes(self, mesh_class: int) -> int:
        """What every device of such a mesh may fill."""
        return usable_bytes(self.site.cluster.smallest_memory_bytes(self.space.first_of(mesh_class)))

    def needed_bytes(self, one: Candidate) -> int:
        """What some device that may fill no more than `usable_bytes` surely holds while the call runs.

        Where devices differ the fullest one may be larger than others.
        """
        return one.least.peak if self.site.cluster.node_memory_bytes else one.most.peak


def fitting_candidates(call: Call, context: CostContext) -> tuple[Candidate, ...]:
    """All that fit devices that have nothing else, without those that others beat at everything.

    Raises InvalidInput when there is none: by how much, and where the call comes nearest to fitting.
    """
    legal = list(legal_candidates(call, context))
    found = tuple(
        pareto_front(one for one in legal if context.needed_bytes(one) <= context.usable_bytes(one.mesh_class))
    )
    if found:
        return found
    where = f"calls.{call.name}"
    if not legal:
        raise InvalidInput(where, f"{call.num_rows} rows a step", "rows and a model that some mesh divides")
    nearest = min(legal, key=lambda one: context.needed_bytes(one) - context.usable_bytes(one.mesh_class))
    needs, has = context.needed_bytes(nearest) / GIB, context.usable_bytes(nearest.mesh_class) / GIB
    role = context.graph.model(call.role or "").role
    raise InvalidInput(
        where,
        f"{needs:.1f} GiB on a device at best ({nearest.placement.strategy}, {nearest.placement.micro_batches} "
        f"micro-batches)",
        f"at most the {has:.1f} GiB that a plan may fill: {needs - has:.1f} GiB less, by more devices to split "
        f"{role} over, larger ones, shorter rows, or a smaller model",
    )


def legal_candidates(call: Call, context: CostContext) -> Iterator[Candidate]:
    """Each strategy, engine and number of micro-batches on each class of meshes that the call's work divides into."""
    for mesh_class in range(len(context.space.classes)):
        mesh = context.space.first_of(mesh_class)
        for strategy in within_nodes(mesh):
            for engine in ENGINES[call.kind]:
                stays = list(_cuts(call, Placement(mesh, strategy, engine), mesh_class, context))
                yield from stays
                if context.graph.trained_by(call.role or "") is None:
                    yield from _offloaded(call, stays, context)


def within_nodes(mesh: DeviceMesh) -> Iterator[Strategy]:
    """Those whose tensor-parallel groups stay on a node: ReaL (section 8.2) leaves out the others too.

    >>> [str(strategy) for strategy in within_nodes(DeviceMesh(0, 2, 0, 1))]
    ['dp2', 'pp2']
    """
    return (one for one in strategies(mesh.num_devices) if one.tp <= mesh.devices_per_node)


def pareto_front(found: Iterable[Candidate]) -> Iterator[Candidate]:
    """Of those that differ in nothing but micro-batches: each that is faster or smaller than every other."""
    alike: dict[Placement, list[Candidate]] = defaultdict(list)
    for one in found:
        alike[replace(one.placement, micro_batches=1)].append(one)
    for group in alike.values():
        smallest: int | None = None
        for one in sorted(group, key=lambda one: (one.seconds, one.most.peak, one.placement.micro_batches)):
            if smallest is None or one.most.peak < smallest:
                smallest = one.most.peak
                yield one


def _cuts(call: Call, whole: Placement, mesh_class: int, context: CostContext) -> Iterator[Candidate]:
    """The same in 1, 2, 4, ... micro-batches, as far as the rows divide."""
    cuts, fits = 1, False
    while cuts <= call.num_rows and (cuts <= ENOUGH_MICRO_BATCHES or not fits):
        placement = replace(whole, micro_batches=cuts)
        if any(violations(call, placement, context.graph)):
            return  # nor do the rows divide into more
        one = _candidate(call, placement, mesh_class, context)
        fits = one.most.peak <= context.usable_bytes(mesh_class)
        yield one
        cuts *= 2


def candidate(call: Call, placement: Placement, context: CostContext) -> Candidate:
    """A legal placement, whatever its bytes."""
    mesh = context.space.meshes.index(placement.mesh)
    (mesh_class,) = (index for index, members in enumerate(context.space.classes) if mesh in members)
    return _candidate(call, placement, mesh_class, context)


def _candidate(call: Call, placement: Placement, mesh_class: int, context: CostContext) -> Candidate:
    work, execution = CallWork.of(call, context.question.workload), context.execution(placement)
    sizes, speeds = ModelSizes.of(context.graph.model(call.role or "")), context.site.cluster.node_speeds
    held = [
        call_bytes(share, execution, sizes, placement.engine, stage, on_cpu=context.site.backend == "cpu")
        for share in different_works(work, placement, speeds)
        for stage in sorted({0, placement.strategy.pp - 1})
    ]
    if speeds:
        seconds = least_cost(work, sizes, placement, context.site.sources, speeds).total
    else:
        seconds = context.site.sources.call_cost(work, execution, sizes, placement.mesh).total
    kept = [one.static + (one.kv_cache if placement.engine == "vllm" else 0) for one in held]  # as `certificate` counts
    totals = [one.total for one in held]
    least, most = MemoryBounds(min(kept), min(totals)), MemoryBounds(max(kept), max(totals))
    return Candidate(placement, mesh_class, seconds, 0.0, least, most)


def _offloaded(call: Call, stays: Sequence[Candidate], context: CostContext) -> Iterator[Candidate]:
    """Candidates of one strategy on one mesh, as they are with their weights in host memory between calls."""
    sizes = ModelSizes.of(context.graph.model(call.role or ""))
    for one in stays:
        placement, strategy = replace(one.placement, offload="all"), one.placement.strategy
        weights = max(sizes.stage_parameters(strategy, stage) for stage in (0, strategy.pp - 1)) * sizes.item
        seconds = context.site.sources.links((placement.mesh,)).seconds(weights, "host")
        yield replace(one, placement=placement, host_seconds=seconds, least=MemoryBounds(0, one.least.peak))
