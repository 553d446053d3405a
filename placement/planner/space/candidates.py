"""Candidates: every way to run a call on each class of meshes, with time and bytes."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

from prefect_rlhf.errors.errors import TooLittleMemory
from prefect_rlhf.placement.cost.call_bytes import CallBytes, CallOnStage, static_bytes
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.paged_cache import expected_cache_bytes, gib_above, whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.uneven import different_works, least_cost
from prefect_rlhf.placement.cost.workload import CallWork
from prefect_rlhf.placement.devices.axes import WITHIN_NODES
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy, strategies
from prefect_rlhf.placement.engine_traits import TRAITS, engines_of, has_not_slept
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.experts import with_expert_degrees
from prefect_rlhf.placement.memory.bytes import usable_bytes
from prefect_rlhf.placement.memory.overhead import call_overhead, communicator_bytes
from prefect_rlhf.placement.plan import Offload, Placement, Recompute
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.mesh_space import MeshSpace
from prefect_rlhf.placement.plans.check import able_engines, violations
from prefect_rlhf.placement.schedule.estimate import training
from prefect_rlhf.placement.search.problem import PairNode
from prefect_rlhf.placement.words.table import WORDS, phrases, searched, without

ENOUGH_MICRO_BATCHES = 64  # for time; more only if memory requires them
CACHE_STEP = sqrt(2)  # ratio of the bytes of consecutive cache sizes
NOTHING = 1 / 64  # of the memory that a plan may fill: a smaller cache, or so few activations, free nothing relevant
RUNGS = 4  # numbers of recomputed layers that are tried: these parts of a stage's layers


@dataclass(frozen=True, slots=True)
class MemoryBounds:
    """Bounds on a device's bytes: resident bytes, and the peak while the call runs."""

    static: int
    peak: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to place a call, on the first mesh of a class.

    If a trained copy leaves completely, its offloaded part and seconds of moves are its optimizer's: its weights come
    and go separately. A candidate also stands for plans that recompute other layers (`_with_recomputation`).
    """

    placement: Placement
    mesh_class: int
    seconds: float
    reload_seconds: float
    offload_seconds: float
    least: MemoryBounds
    """What each device holds, or more: all the time, and while the call runs."""
    most: MemoryBounds
    """The fullest device's bytes; without prefetch, offloaded parts are in host memory while other calls run."""
    copy_bytes: int
    """Each device's bytes, or more, while the copy of weights is resident and no call uses it."""
    surely_comes: bool = False
    """Whether it is reloaded for this call and offloaded after it, however the copy is shared."""
    loaded_bytes: int = 0
    """`copy_bytes`, with the offloaded part."""
    spared_seconds: float = 0.0
    """How much less time such a plan may take."""
    fullest_bytes: int = 0
    """What a device holds, or more, in such a plan while the call runs."""

    def is_no_worse(self, other: Candidate) -> bool:
        """Whether it takes no longer and needs no more bytes, also in the numbers for bounds."""
        return (
            self.seconds <= other.seconds
            and self.seconds - self.spared_seconds <= other.seconds - other.spared_seconds
            and self.most.peak <= other.most.peak
            and self.least.peak <= other.least.peak
            and self.fullest_bytes <= other.fullest_bytes
        )


Candidates = Mapping[str, tuple[Candidate, ...]]
"""The candidates of each call, by its name."""


@dataclass(frozen=True, slots=True)
class CostContext:
    """Everything needed to price a question's candidates.

    `graph` has the calls that run in every iteration, `space` the meshes that they may have. `execution` says how
    engines run a call, by default ours.
    """

    question: Question
    graph: DataflowGraph
    space: MeshSpace
    execution: Callable[[Placement], Execution] = Execution.of
    _works: dict[str, _Works] = field(default_factory=dict, init=False, repr=False, compare=False)
    moves: dict[str, tuple[Sequence[Candidate], Sequence[Candidate], PairNode]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By the reader of trained weights: two lists of candidates and the move between them, which problems share."""
    _usable_bytes: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        question: Question,
        execution: Callable[[Placement], Execution] = Execution.of,
        also: Iterable[DeviceMesh] = (),
    ) -> CostContext:
        """Return a question's context for the meshes of its site's space, and `also`."""
        site = question.site
        space = MeshSpace.of(site.cluster, site.mesh, site.sources, also)
        return cls(question, training(question.graph), space, execution)

    @property
    def site(self) -> Site:
        return self.question.site

    def works(self, call: Call) -> _Works:
        """Return a call's work, computed once."""
        known = self._works.get(call.name)
        if known is None or known.call is not call:
            known = self._works[call.name] = _Works.of(call, self)
        return known

    def usable_bytes(self, mesh_class: int) -> int:
        """Return how many bytes a plan may use on every device of such a mesh."""
        known = self._usable_bytes.get(mesh_class)
        if known is None:
            memory = self.site.cluster.smallest_memory_bytes(self.space.first_of(mesh_class))
            known = self._usable_bytes[mesh_class] = usable_bytes(memory, self.site.backend)
        return known

    def needed_bytes(self, candidate: Candidate) -> int:
        """Return a lower bound on the bytes that the call needs on a device with `usable_bytes`.

        If devices differ, the fullest may be a larger device, so this is what every device needs.
        """
        return candidate.least.peak if self.site.cluster.node_memory_bytes else candidate.most.peak

    def fits(self, candidate: Candidate) -> bool:
        """Whether the candidate fits an otherwise empty device."""
        return self.needed_bytes(candidate) <= self.usable_bytes(candidate.mesh_class)


@dataclass(frozen=True, slots=True)
class _Works:
    """The work of a call on the sizes of its model: the most, for memory, and the expected, for time."""

    call: Call
    sizes: ModelSizes
    most: CallWork
    expected: CallWork
    _by_replicas: dict[int, tuple[CallWork, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, call: Call, context: CostContext) -> _Works:
        workload, sizes = context.question.workload, ModelSizes.of(context.graph.model(call.role or ""))
        return cls(call, sizes, CallWork.of(call, workload), CallWork.expected(call, workload))

    def of_replicas(self, placement: Placement, node_speeds: Sequence[float]) -> tuple[CallWork, ...]:
        """Return the distinct works of all replicas; on equally fast nodes, only the number of replicas matters."""
        if node_speeds:
            return different_works(self.most, placement, node_speeds)
        dp = placement.strategy.dp
        if dp not in self._by_replicas:
            self._by_replicas[dp] = different_works(self.most, placement, node_speeds)
        return self._by_replicas[dp]


def fitting_candidates(call: Call, context: CostContext) -> tuple[Candidate, ...]:
    """Return a call's Pareto-optimal placements that fit an otherwise empty device.

    If no placement fits, raises TooLittleMemory with the missing bytes and the nearest placement.
    """
    found: list[Candidate] = []
    for resident in _resident(call, context):
        front = pareto_front(filter(context.fits, resident))
        found += [*front, *_offloads(call, front, context)]  # an offload changes no number that the front is made by
    if found:
        return tuple(found)
    legal = list(legal_candidates(call, context))
    field = f"calls.{call.name}"
    if not legal:
        mesh = context.space.first_of(0)
        graph, backend = context.graph, context.site.backend
        engine = able_engines(call, graph, backend)[0]
        raise next(violations(call, Placement(mesh, Strategy(mesh.num_devices), engine), graph, backend))
    nearest = min(legal, key=lambda option: context.needed_bytes(option) - context.usable_bytes(option.mesh_class))
    needs, has = context.needed_bytes(nearest) / GIB, context.usable_bytes(nearest.mesh_class) / GIB
    role = context.graph.model(call.role or "").role
    recomputes = call.kind == "train_step" and TRAITS[nearest.placement.engine].recomputes
    raise TooLittleMemory(
        field,
        f"{needs:.1f} GiB on a device at best ({nearest.placement.strategy}, {_cut_in_words(nearest.placement)})",
        f"at most the {has:.1f} GiB that a plan may fill; save {needs - has:.1f} GiB by more devices to split "
        f"{role} over, larger devices, shorter rows, or a smaller model"
        + ("; recomputation of all layers is not enough" if recomputes else ""),
    )


def legal_candidates(call: Call, context: CostContext) -> Iterator[Candidate]:
    """Yield each way to run the call: strategy, engine, micro-batches or cache, offload, class of meshes.

    If a role is trained, a call on the trained copy leaves the optimizer's offload to the train_step. A way that does
    not fit has no seconds and no offload.
    """
    for resident in _resident(call, context):
        yield from resident
        yield from _offloads(call, list(filter(context.fits, resident)), context)


def _resident(call: Call, context: CostContext) -> Iterator[list[Candidate]]:
    """Yield the candidates that keep their weights on the devices, those that differ in `uncut` words together."""
    model = context.graph.model(call.role or "")
    for mesh_class in range(len(context.space.classes)):
        mesh = context.space.first_of(mesh_class)
        for strategy in strategies_within_nodes(mesh):
            for engine in engines_of(call.kind):
                for spread in with_expert_degrees(strategy, model, engine):
                    ways = _caches if TRAITS[engine].paged_cache else _cuts
                    wholes = searched(call, Placement(mesh, spread, engine), context.graph)
                    yield [way for whole in wholes for way in ways(call, whole, mesh_class, context)]


def strategies_within_nodes(mesh: DeviceMesh) -> Iterator[Strategy]:
    """Yield strategies that keep groups which communicate in each layer on one node, as ReaL does (section 8.2).

    >>> [str(strategy) for strategy in strategies_within_nodes(DeviceMesh(0, 2, 0, 1))]
    ['dp2', 'pp2']
    """
    every = strategies(mesh.num_devices)
    return (each for each in every if all(each.span(axis) <= mesh.devices_per_node for axis in WITHIN_NODES))


def pareto_front(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates that no other dominates; only those that differ in cuts, cache or recomputation compete."""
    front: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.seconds, c.most.peak, c.placement.micro_batches)):
        if not any(better.is_no_worse(candidate) for better in front):
            front.append(candidate)
    return front


def uncut(placement: Placement) -> Placement:
    """Return the placement without cuts, equal for candidates that compete with each other; see `pareto_front`."""
    return without(placement, (word for word in WORDS.values() if word.moves_nothing))


def in_micro_batches(call: Call, whole: Placement, context: CostContext) -> Iterator[Placement]:
    """Yield the placement in 1, 2, 4, ... micro-batches, up to the number of items per replica."""
    for power in range(call.num_rows.bit_length()):
        placement = replace(whole, micro_batches=1 << power)
        if any(violations(call, placement, context.graph, context.site.backend)):
            return  # nor into more
        yield placement


def candidate(call: Call, placement: Placement, context: CostContext) -> Candidate:
    """Return a legal placement's candidate, however many bytes it needs."""
    return _candidate(call, placement, context.space.class_of(placement.mesh), context)


def _cuts(call: Call, whole: Placement, mesh_class: int, context: CostContext) -> Iterator[Candidate]:
    """The candidates in micro-batches: in enough of them, or until they fit."""
    fits = False
    for placement in in_micro_batches(call, whole, context):
        if fits and placement.micro_batches > ENOUGH_MICRO_BATCHES:
            return
        options = _with_recomputation(call, placement, mesh_class, context)
        fits = options[0].most.peak <= context.usable_bytes(mesh_class)
        yield from options


def _with_recomputation(call: Call, plain: Placement, mesh_class: int, context: CostContext) -> list[Candidate]:
    """Return the call without recomputation and, if it is a train_step, with more and more recomputed layers.

    More layers take longer and need fewer bytes of every device. So a plan whose number of layers lies above that of a
    candidate, and not above the next, takes at least as long as with a layer more than the former, and needs at least
    the bytes of the latter. Before the first that fits, a plan has at least as many as fit an empty device. If
    recomputation saves nearly nothing, a single candidate stands for all numbers.
    """
    if call.kind != "train_step" or not TRAITS[plain.engine].recomputes:
        return [_if_it_fits(call, plain, mesh_class, context)]
    num_layers = ModelSizes.of(context.graph.model(call.role or "")).stage_layers(plain.strategy.pp)
    counts = sorted({-(-num_layers * rung // RUNGS) for rung in range(1, RUNGS)} - {num_layers})
    words: list[Recompute] = [0, *counts, "all"]

    def untimed(recomputes: Iterable[Recompute]) -> list[Candidate]:
        placements = [replace(plain, recompute=recompute) for recompute in recomputes]
        return list(_untimed(call, placements, mesh_class, context))

    kept, *others = untimed(words)
    most, usable = others[-1], context.usable_bytes(mesh_class)
    if kept.most.peak <= min(usable, most.most.peak + usable * NOTHING):
        least = MemoryBounds(kept.least.static, most.least.peak)
        return [replace(_timed(call, kept, context), least=least, fullest_bytes=most.fullest_bytes)]
    options = dict(zip(words, (kept, *others), strict=True))
    stands_for = dict(zip(words, [0, *(before + 1 for before in (0, *counts))], strict=True))  # this number, and more
    fitting = [word for word in words if context.fits(options[word])]
    if fitting and fitting[0]:
        fewer = range(stands_for[fitting[0]], num_layers if fitting[0] == "all" else fitting[0])
        fewest = bisect_left(fewer, True, key=lambda count: context.fits(untimed([count])[0]))
        stands_for[fitting[0]] = fewer.start + fewest
    timed = dict.fromkeys([*fitting, *(stands_for[word] for word in fitting)])
    seconds = _train_step_seconds(call, plain, timed, context)
    for word in fitting:
        spared = max(0.0, seconds[word] - seconds[stands_for[word]])
        options[word] = replace(options[word], seconds=seconds[word], spared_seconds=spared)
    return list(options.values())


def _caches(call: Call, whole: Placement, mesh_class: int, context: CostContext) -> Iterator[Candidate]:
    """The candidates with a cache for all rows at their expected growth, and smaller and smaller caches.

    The smallest holds a single row, or is too small to matter.
    """
    if any(violations(call, whole, context.graph, context.site.backend)):
        return
    workload, tp = context.question.workload.of(call.rows), whole.strategy.tp
    sizes, usable = ModelSizes.of(context.graph.model(call.role or "")), context.usable_bytes(mesh_class)
    works = different_works(CallWork.of(call, workload), whole, context.site.cluster.node_speeds)
    rows = max(work.replica_rows(whole.strategy.dp) for work in works)
    expected = expected_cache_bytes(rows, workload, sizes, tp)
    least = max(whole_cache_bytes(1, workload.longest, sizes, tp), usable * NOTHING)
    if expected == whole_cache_bytes(rows, workload.longest, sizes, tp):
        yield _if_it_fits(call, whole, mesh_class, context)
        expected = int(expected / CACHE_STEP)
    elif expected < least:
        yield _if_it_fits(call, replace(whole, cache_gib=gib_above(least)), mesh_class, context)
    while expected >= least:
        yield _if_it_fits(call, replace(whole, cache_gib=gib_above(expected)), mesh_class, context)
        expected = int(expected / CACHE_STEP)


def _if_it_fits(call: Call, placement: Placement, mesh_class: int, context: CostContext) -> Candidate:
    (untimed,) = _untimed(call, [placement], mesh_class, context)
    return _timed(call, untimed, context)


def _timed(call: Call, untimed: Candidate, context: CostContext) -> Candidate:
    """The candidate, without its seconds (infinite) if it does not fit: many do not, and none of these is timed."""
    if not context.fits(untimed):
        return untimed
    return replace(untimed, seconds=_seconds(call, untimed.placement, context))


def _candidate(call: Call, placement: Placement, mesh_class: int, context: CostContext) -> Candidate:
    (untimed,) = _untimed(call, [placement], mesh_class, context)
    return replace(untimed, seconds=_seconds(call, placement, context))


def _untimed(call: Call, placements: Sequence[Placement], mesh_class: int, context: CostContext) -> Iterator[Candidate]:
    """The candidates of placements that differ in recomputed layers alone, without their seconds."""
    site, works, first = context.site, context.works(call), placements[0]
    execution, *others = (context.execution(each) for each in placements)
    recomputes = [each.recompute for each in (execution, *others)]
    by_device = [
        CallOnStage(
            share, execution, works.sizes, first.engine, stage, share.workload.longest, site.backend == "cpu"
        ).num_bytes(recomputes)
        for share in works.of_replicas(first, site.cluster.node_speeds)
        for stage in stages_counted(first.strategy.pp)
    ]
    kept_cache = TRAITS[first.engine].paged_cache  # as `certificate` counts
    graphs, groups = call_overhead(call, first, context.graph.model(call.role or ""), site.backend)
    ranks = communicator_bytes(first.mesh.num_devices) if site.backend == "cuda" else 0  # of all, or of more
    for placement, *device_bytes in zip(placements, *by_device, strict=True):
        static = [terms.static + (terms.kv_cache if kept_cache else 0) + graphs for terms in device_bytes]
        peaks = [terms.total + graphs + groups for terms in device_bytes]
        least, most = MemoryBounds(min(static), min(peaks) + ranks), MemoryBounds(max(static), max(peaks))
        fullest = most.peak + ranks
        yield Candidate(placement, mesh_class, math.inf, 0.0, 0.0, least, most, least.static, fullest_bytes=fullest)


def stages_counted(pp: int) -> list[int]:
    """Return pipeline stages that include the fullest and the emptiest.

    The fullest is the first, with the embedding and most micro-batches in flight, or the last, with the head. Of those
    between, the stage before the last has the fewest layers and micro-batches, and no table.

    >>> stages_counted(1), stages_counted(2), stages_counted(8)
    ([0], [0, 1], [0, 6, 7])
    """
    return sorted({0, max(0, pp - 2), pp - 1})


def _seconds(call: Call, placement: Placement, context: CostContext) -> float:
    """The call's time with rows as long as expected, in the best order of its devices, in seconds."""
    works = context.works(call)
    return seconds_of(works.expected, works.sizes, placement, context)


def _train_step_seconds(
    call: Call, plain: Placement, recomputes: Iterable[Recompute], context: CostContext
) -> dict[Recompute, float]:
    """A train_step's time for each number of recomputed layers, in seconds."""
    works, site, placements = context.works(call), context.site, {r: replace(plain, recompute=r) for r in recomputes}
    if site.cluster.node_speeds or not placements:
        return {recompute: _seconds(call, placement, context) for recompute, placement in placements.items()}
    layers = [context.execution(placement).recompute for placement in placements.values()]
    costs = site.sources.train_step_costs(works.expected, context.execution(plain), works.sizes, plain.mesh, layers)
    return {recompute: cost.total for recompute, cost in zip(placements, costs, strict=True)}


def seconds_of(work: CallWork, sizes: ModelSizes, placement: Placement, context: CostContext) -> float:
    """Return a call's working time in seconds under its best device order."""
    sources, speeds = context.site.sources, context.site.cluster.node_speeds
    if speeds:
        return least_cost(work, sizes, placement, sources, speeds).total
    return sources.call_cost(work, context.execution(placement), sizes, placement.mesh).total


def _offloads(call: Call, resident: Sequence[Candidate], context: CostContext) -> Iterator[Candidate]:
    """Yield the candidates of a strategy and mesh that keep some of their weights in host memory between calls."""
    has_adapter = context.graph.model(call.role or "").adapter is not None
    if resident and has_not_slept(resident[0].placement.engine, has_adapter, context.site.backend):
        return
    for part in ("optimizer", "all") if call.kind == "train_step" else ("all",):
        yield from _offloaded(call, resident, part, context)


def _offloaded(call: Call, resident: Sequence[Candidate], part: Offload, context: CostContext) -> Iterator[Candidate]:
    """Yield candidates of a strategy and mesh that keep a part of their weights in host memory between calls."""
    if not resident:
        return
    placement = replace(resident[0].placement, offload=part)
    stages, started = _ends(call, placement, context), context.site.sources.orchestration_seconds
    visits = replace(placement, offload="optimizer") if call.kind == "train_step" else placement
    reload_seconds, offload_seconds = host_seconds(call, visits, context)
    graphs, _ = call_overhead(call, placement, context.graph.model(call.role or ""), context.site.backend)
    weights = [graphs + stage.weights for stage in stages]
    staying = weights if part == "optimizer" else [graphs for _ in stages]
    comes = _comes_for(call, placement, context)
    optimizer = min(stage.static - stage.weights for stage in stages)
    for option in resident:
        yield replace(
            option,
            placement=replace(option.placement, offload=part),
            reload_seconds=reload_seconds + started,
            offload_seconds=offload_seconds + started,
            least=MemoryBounds(min(staying), option.least.peak),
            most=MemoryBounds(max(staying), option.most.peak),
            copy_bytes=min(weights) if call.kind == "train_step" else option.copy_bytes,
            surely_comes=comes,
            loaded_bytes=graphs + optimizer if call.kind == "train_step" and part == "all" else option.least.static,
        )


def host_seconds(call: Call, placement: Placement, context: CostContext) -> tuple[float, float]:
    """Return lower bounds on the host link's seconds for a reload before the call and an offload after it.

    Only a train_step changes the reloaded part, so only its offload copies bytes. If the train_step's engine cannot
    share the trained weights, their copy is overwritten after each reload, so neither copies bytes.
    """
    stages = _ends(call, placement, context)
    moved = max(stage.optimizer + (stage.weights if placement.offload == "all" else 0) for stage in stages)
    seconds = context.site.sources.links((placement.mesh,)).seconds(moved, "host")
    trainer = context.graph.trained_by(call.role or "")
    if call == trainer or not TRAITS[placement.engine].drops_weights:
        return seconds, seconds
    is_copy = trainer is not None and placement.engine not in engines_of(trainer.kind)
    is_overwritten = is_copy and all(own.trained for own in context.graph.weights(call.role or ""))
    return 0.0 if is_overwritten else seconds, 0.0


def _ends(call: Call, placement: Placement, context: CostContext) -> list[CallBytes]:
    """Return the static bytes on a device of each stage that is counted."""
    sizes, trains = ModelSizes.of(context.graph.model(call.role or "")), call.kind == "train_step"
    strategy = placement.strategy
    return [static_bytes(Execution(strategy), sizes, trains, stage) for stage in stages_counted(strategy.pp)]


def stops_devices(placement: Placement, context: CostContext) -> bool:
    """Whether the devices stop computing while the copy of weights moves: true for vLLM's copies on cuda."""
    return TRAITS[placement.engine].sleeps_on_cuda and context.site.backend == "cuda"


def _cut_in_words(placement: Placement) -> str:
    if not TRAITS[placement.engine].paged_cache:
        return ", ".join(phrases(placement)) or "in a single micro-batch"
    return ", ".join(phrases(placement)) or "a cache for all rows"


def _comes_for(call: Call, placement: Placement, context: CostContext) -> bool:
    """Whether its copy comes before this call and goes after it in every step, of all calls that may share the copy."""
    trainer = context.graph.trained_by(call.role or "")
    if trainer is not None and placement.engine in engines_of(trainer.kind):
        return call == trainer
    return call == next(other for other in context.graph if other.role == call.role and other != trainer)
