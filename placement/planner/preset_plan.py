"""A preset's plan: completed with the fewest savings, as a run uses it, or the best plan that it allows, by search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.axes import OFFERED
from prefect_rlhf.placement.devices.mesh import Backend, ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.alignment import aligned
from prefect_rlhf.placement.memory.fit import longest_rows
from prefect_rlhf.placement.memory.least_bytes import proved_too_large
from prefect_rlhf.placement.memory.remedies import REMEDIES_SHOWN, Remedy, refusal
from prefect_rlhf.placement.memory.savings import Savings
from prefect_rlhf.placement.plan import ExecutionPlan, Placement
from prefect_rlhf.placement.planner.planned import PresetResult
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.solution import TIGHTER, solve_fitting
from prefect_rlhf.placement.planner.space.candidates import Candidate, Candidates, CostContext, candidate
from prefect_rlhf.placement.planner.space.plan_problem import PlanProblem, PlanSpace, restricted_problem
from prefect_rlhf.placement.plans.check import able_engines, check_plan, violations
from prefect_rlhf.placement.plans.plan_file import name_in_lease
from prefect_rlhf.placement.plans.presets import PRESETS, Preset, preset_named
from prefect_rlhf.placement.plans.stated_words import (
    NO_WORDS,
    Words,
    agreeing,
    as_stated,
    check_calls,
    flag,
    has_degrees,
    names_of,
    stated_mesh,
    value_of,
    with_shared_words,
    with_values,
)
from prefect_rlhf.placement.plans.streaming import in_parts
from prefect_rlhf.placement.search.budget import Budget

MOST_CUTS = 64  # micro-batches of a preset that cuts all calls alike, unless its first number is larger
DEFAULT_SEQUENCE_LENGTH = 1024  # tokens of the longest row, if it is unknown
NODE = 8  # devices of the larger nodes that are tried
MOST_NODES = 64  # of the largest cluster that is tried


def preset(
    name: str,
    graph: DataflowGraph,
    cluster: ClusterShape,
    mesh: DeviceMesh,
    max_sequence_length: int = DEFAULT_SEQUENCE_LENGTH,
    backend: Backend = "cuda",
) -> ExecutionPlan:
    """Return the completed preset for rows of at most `max_sequence_length` tokens; see `completed_preset`."""
    return completed_preset(name, graph, cluster, mesh, longest_rows(graph, max_sequence_length), backend)


def completed_preset(
    name: str,
    graph: DataflowGraph,
    cluster: ClusterShape,
    mesh: DeviceMesh,
    workload: Workload,
    backend: Backend,
    words: Words = NO_WORDS,
) -> ExecutionPlan:
    """Return the plan that a preset gives `graph` on `mesh`; runs, dry runs and questions all use this.

    Models are split over as few devices as are legal and fit. With each split, the plan has the fewest savings that
    make it fit: micro-batches first, slower savings last (`Savings`). `words` stay as stated. The plan depends only on
    the arguments, not on the speed of devices. Raises InvalidInput if no legal plan exists, for wrong words, and if no
    plan fits, with a remedy.
    """
    cluster.check_mesh(mesh)
    check_calls(words, graph)
    asked = _Completion(preset_named(name), name, graph, replace(cluster, backend=backend), mesh, workload, backend)
    found = asked.complete(words)
    if isinstance(found, ExecutionPlan):
        return found
    raise asked.refused(words, found)


@dataclass(frozen=True, slots=True)
class _Completion:
    """A preset with the job and the devices that it is completed for."""

    rule: Preset
    name: str
    graph: DataflowGraph
    cluster: ClusterShape
    mesh: DeviceMesh
    workload: Workload
    backend: Backend

    def complete(self, words: Words) -> ExecutionPlan | list[ExecutionPlan]:
        """Return the plan, or else the plans that are too large, each with all of its savings.

        Raises InvalidInput if no plan is legal.
        """
        refused: list[InvalidInput] = []
        splits: list[ExecutionPlan] = []
        savings = Savings(self.graph, self.workload, self.backend, names_of(words))
        for least in (n for n in range(1, self.mesh.num_devices + 1) if self.mesh.num_devices % n == 0):
            try:
                whole = self._legal(least, words)
            except InvalidInput as error:
                refused.append(error)
                continue
            # Calls of parts run at the same time, so their plan may need more memory than the plan without parts.
            splits += [_with_stated_parts(in_parts(self.graph, whole, self.rule.parts), words), whole]
        for may_be_slow, plan in product((False, True), dict.fromkeys(splits)):  # a split loses less than slow savings
            fitting = savings.least(plan, may_be_slow=may_be_slow)
            if fitting is not None:
                return fitting
        too_large = [savings.all_of(plan)[-1] for plan in dict.fromkeys(splits)]
        if too_large:
            return too_large
        raise self._illegal(refused[0])

    def _illegal(self, first: InvalidInput) -> InvalidInput:
        if first.field != "mesh":
            return first
        other = f"; {self.name} has no plan on {self.mesh.name}, auto and flattening may have"
        return InvalidInput(first.field, first.seen, first.expected + (other if self.name != "flattening" else ""))

    def _legal(self, least: int, words: Words) -> ExecutionPlan:
        """The plan with each model split over at least `least` devices, or over all of its mesh."""
        placements = tuple((call.name, self._place(call, least, words)) for call in self.graph)
        plan = with_shared_words(ExecutionPlan(self.name, self.cluster, placements), self.graph, words)
        if words:
            try:
                check_plan(plan, self.graph, self.mesh)
            except InvalidInput as error:
                raise as_stated(error, words) from error
        return aligned(plan, self.graph)

    def _place(self, call: Call, least: int, words: Words) -> Placement:
        """The first legal strategy that splits the call's model over at least `least` devices, or over its whole mesh.

        Strategies that give each replica an item of each mini-batch precede strategies that leave some replicas idle.
        """
        graph, backend, name = self.graph, self.backend, call.name
        mesh = stated_mesh(words, name, self.cluster) or self.rule.mesh(call, self.mesh, graph)
        if call.kind == "compute":
            return with_values(
                Placement(DeviceMesh(mesh.first_node, 1, mesh.first_device, 1), Strategy(), "python"), words, name
            )
        engine = able_engines(call, graph, backend, self.rule.engines(call))[0]
        refused: list[InvalidInput] = []
        agreed = list(agreeing(self.rule.strategies(mesh), words, name))
        for strategy in sorted(agreed, key=lambda strategy: strategy.dp * call.mini_batches > call.num_items):
            if not has_degrees(words, name) and strategy.replica_devices < min(least, mesh.num_devices):
                continue
            placement = with_values(Placement(mesh, strategy, engine, self._first_cuts(call, strategy)), words, name)
            violation = next(violations(call, placement, graph, backend), None)
            if violation is None:
                return placement
            refused.append(violation)
        if not agreed:
            seen = " ".join(f"{axis}{words[name][axis]}" for axis in OFFERED if axis in words[name])
            degrees = f"degrees of {self.name} whose product is {mesh.num_devices}, the devices of {mesh.name}"
            raise InvalidInput(f"placement.{name}", seen, degrees)
        if refused and name in words and isinstance(stated := as_stated(refused[0], words), InvalidInput):
            raise stated
        why = f" ({refused[0]})" if refused else ""
        raise InvalidInput("mesh", self.mesh.name, f"devices that can run {name}{why}")

    def _first_cuts(self, call: Call, strategy: Strategy) -> int:
        """The micro-batches of a preset that states the tokens of a micro-batch; 1 for other presets."""
        if self.rule.micro_batch_tokens is None:
            return 1
        tokens = max(each.num_rows for each in self.graph if each.role) * self.workload.mean_length
        cuts = 1
        while tokens > cuts * self.rule.micro_batch_tokens * self.mesh.num_devices:
            cuts *= 2
        return max(1, min(cuts, *(each.most_items(strategy.dp) for each in call.by_row_set)))

    def refused(self, words: Words, too_large: Sequence[ExecutionPlan]) -> InvalidInput:
        """Return the refusal of a preset whose plans are all too large, even with all savings.

        It begins with the smallest change that works: another value of a stated word, or another preset.
        """
        savings = Savings(self.graph, self.workload, self.backend)
        plan = min(too_large, key=lambda each: savings.certificate(each).excess_bytes)
        proposed = list(self._without_stated(words, savings)) or list(self._other_presets(words, savings))
        otherwise = "" if proposed else self._verdict()
        return refusal(plan, savings.certificate(plan), proposed[:REMEDIES_SHOWN], otherwise)

    def _without_stated(self, words: Words, savings: Savings) -> Iterator[Remedy]:
        """Yield the changes of stated words with which the preset has a plan: of a single word, else of all of them."""
        singles = [[name] for name in sorted(names_of(words))]
        for freed in [*singles, *([sorted(names_of(words))] if len(singles) > 1 else [])]:
            plan = self._completed(_but(words, freed))
            if plan is None:
                continue
            changed = _but(words, [])
            for call, word in freed:
                value = value_of(plan[call], word)
                if word == "mesh":
                    value = name_in_lease(plan[call].mesh, self.cluster)
                changed[call] = {**changed[call], word: value}
            proved = self._completed(changed)
            if proved is not None:
                differing = [(call, word) for call, word in freed if changed[call][word] != words[call][word]]
                change = " ".join(flag(call, word, changed[call][word]) for call, word in differing)
                yield Remedy(change, proved, savings.certificate(proved))
                if len(freed) > 1:
                    return

    def _other_presets(self, words: Words, savings: Savings) -> Iterator[Remedy]:
        for name in PRESETS:
            if name != self.name and (plan := replace(self, rule=preset_named(name), name=name)._completed(words)):
                yield Remedy(f"-p plan={name}", plan, savings.certificate(plan))

    def _completed(self, words: Words) -> ExecutionPlan | None:
        """The completed plan, or None if no plan is legal and fits."""
        try:
            found = self.complete(words)
        except InvalidInput:
            return None
        return found if isinstance(found, ExecutionPlan) else None

    def _verdict(self) -> str:
        """Words for when no change of words helps: whether that is proved, and how many devices would do."""
        proved = proved_too_large(self.graph, self.workload, self.cluster, self.backend)
        return f"{proved or 'no preset fits'}; {self._enough()}"

    def _enough(self) -> str:
        """The smallest of some larger clusters of the same devices that have a plan of this preset, in words.

        Nodes with more devices have more host memory, in proportion.
        """
        for larger in _larger(self.mesh):
            host = self.cluster.host_memory_bytes * max(1, larger.devices_per_node // self.cluster.devices_per_node)
            cluster = replace(
                self.cluster,
                num_nodes=larger.num_nodes,
                devices_per_node=larger.devices_per_node,
                node_speeds=(),
                node_memory_bytes=(),
                node_devices=(),
                device_memory_bytes=self.cluster.whole_memory_bytes(self.mesh.first_node),
                host_memory_bytes=host,
                leased=larger,
            )
            if replace(self, cluster=cluster, mesh=larger)._completed(NO_WORDS) is not None:
                return f"{larger.num_devices} devices are enough, as {larger.num_nodes} x {larger.devices_per_node}"
        return f"even {MOST_NODES} nodes of such devices are not enough for {self.name}"


def _larger(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Yield larger meshes from the first device on: twice the devices of a node up to eight, then twice the nodes."""
    num_nodes, devices = mesh.num_nodes, mesh.devices_per_node
    while num_nodes == 1 and 2 * devices <= NODE:
        devices *= 2
        yield DeviceMesh(0, 1, 0, devices)
    while num_nodes < MOST_NODES:
        num_nodes *= 2
        yield DeviceMesh(0, min(num_nodes, MOST_NODES), 0, devices)


def _but(words: Words, freed: Sequence[tuple[str, str]]) -> dict[str, Mapping[str, Any]]:
    """The stated words without some."""
    return {
        call: {word: value for word, value in values.items() if (call, word) not in freed}
        for call, values in words.items()
    }


def _with_stated_parts(plan: ExecutionPlan, words: Words) -> ExecutionPlan:
    stated = {call: values["parts"] for call, values in words.items() if "parts" in values}
    placements = ((name, replace(old, parts=stated.get(name, old.parts))) for name, old in plan.placements)
    return replace(plan, placements=tuple(placements)) if stated else plan


def preset_result(question: Question, name: str, words: Words = NO_WORDS) -> PresetResult:
    """Return the plan that a run with this preset would use, and its estimate."""
    site, rule = question.site, preset_named(name)
    asked = _Completion(rule, name, question.graph, site.cluster, site.mesh, question.workload, site.backend)
    try:
        found = asked.complete(words)
    except RlhfError as error:
        return PresetResult(name, refused=str(error).splitlines()[0], is_impossible=True)
    if isinstance(found, ExecutionPlan):
        return PresetResult(name, found, question.estimate(found))
    return PresetResult(name, refused="does not fit")


def some_preset_fits(question: Question) -> bool:
    """Whether some preset has a plan that fits."""
    site = question.site
    for name, rule in PRESETS.items():
        asked = _Completion(rule, name, question.graph, site.cluster, site.mesh, question.workload, site.backend)
        with suppress(RlhfError):
            if isinstance(asked.complete(NO_WORDS), ExecutionPlan):
                return True
    return False


def best_admitted(
    question: Question, space: PlanSpace, name: str, rule: Preset, budget: Budget
) -> ExecutionPlan | None:
    """Return the best plan that a preset allows, in its parts if they fit; None if no plan fits.

    Raises InvalidInput if the mesh has no such parts, or a call cannot run on its part.
    """
    for problem in preset_problems(rule, question.site.mesh, space):
        plan = solve_fitting(question, problem, budget, name=name, shares=TIGHTER, repair=False)
        if plan is not None:
            streamed = in_parts(question.graph, plan, rule.parts)
            return streamed if question.fits(streamed) else plan
    return None


def preset_problems(rule: Preset, mesh: DeviceMesh, space: PlanSpace) -> Iterator[PlanProblem]:
    """Yield a preset's search problems in order of preference; the first with a solution gives the preset's plan.

    A symmetric preset has a problem for each strategy. If it cuts all calls alike, each strategy comes with the fewest
    micro-batches first, then with more. Raises InvalidInput if the mesh has no such parts, or a call cannot run on its
    part.
    """
    graph = space.context.graph
    meshes = {call: rule.mesh(graph.call(call), mesh, graph) for call in space.candidates}
    refused: list[InvalidInput] = []
    strategies = tuple(rule.strategies(mesh)) if rule.symmetric else (None,)
    for cuts, strategy in product(_numbers_of_cuts(rule, mesh, space.context), strategies):
        allowed = {
            call: frozenset(rule.strategies(on) if strategy is None else (strategy,)) for call, on in meshes.items()
        }

        def admits(call: Call, placement: Placement, allowed: Mapping[str, Set[Strategy]] = allowed) -> bool:
            dense = replace(placement.strategy, ep=1)  # experts may lie as suits the call
            return placement.engine in rule.engines(call) and dense in allowed[call.name]

        options = space
        if cuts is not None and strategy is not None:
            options = replace(space, candidates=_cut_alike(rule, strategy, cuts, meshes, space))
        try:
            yield restricted_problem(options, meshes, admits)
        except InvalidInput as error:
            refused.append(error)
    if refused:
        raise refused[-1]


def _numbers_of_cuts(rule: Preset, mesh: DeviceMesh, context: CostContext) -> Iterator[int | None]:
    """The numbers of micro-batches that all calls may have; None if each call has its own."""
    if rule.micro_batch_tokens is None:
        yield None
        return
    rows = max(call.num_rows for call in context.graph if call.role is not None)
    tokens, cuts = rows * context.question.workload.mean_length, 1
    while tokens > cuts * rule.micro_batch_tokens * mesh.num_devices:
        cuts *= 2
    most = max(cuts, MOST_CUTS)
    while cuts <= most:
        yield cuts
        cuts *= 2


def _cut_alike(
    rule: Preset, strategy: Strategy, micro_batches: int, meshes: Mapping[str, DeviceMesh], space: PlanSpace
) -> Candidates:
    """The candidate of every call with this strategy, if it is legal, and its mesh is allowed for the call."""
    context, candidates = space.context, dict[str, tuple[Candidate, ...]]()
    graph, backend = context.graph, context.site.backend
    for name, mesh in meshes.items():
        call = graph.call(name)
        engine = able_engines(call, graph, backend, rule.engines(call))[0]
        placement = Placement(mesh, strategy, engine, micro_batches)
        of_mesh = context.space.class_of(mesh)
        may_have = any(option.mesh_class == of_mesh for option in space.candidates[name])
        legal = may_have and not any(violations(call, placement, graph, backend))
        candidates[name] = (candidate(call, placement, context),) if legal else ()
    return candidates
