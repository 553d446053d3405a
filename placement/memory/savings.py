"""Savings: changes of a plan's words that save memory, and the fewest of them that make the plan fit.

They are ordered by the time that they cost: large micro-batches, sequence parallelism, a cache no larger than its rows
are expected to fill, offloads of frozen and of generating copies, recomputation of layers. Small micro-batches, a
smaller cache, and offloads of trained copies are slow. Meshes, strategies and engines stay.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import sqrt
from types import MappingProxyType
from typing import Any

from prefect_rlhf.placement.augmented.augmented_graph import AugmentedGraph
from prefect_rlhf.placement.cost.paged_cache import expected_cache_bytes, gib_above, whole_cache_bytes
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.layout.sharing import one_base
from prefect_rlhf.placement.memory.certificate import Certificate, augment_few, certify
from prefect_rlhf.placement.plan import (
    ExecutionPlan,
    ModelInstance,
    Offload,
    Placement,
    instances,
    trained_instance,
)
from prefect_rlhf.placement.plans.check import sleepless
from prefect_rlhf.placement.words.micro_batches import MICRO_BATCHES
from prefect_rlhf.placement.words.table import WORDS, having, without
from prefect_rlhf.placement.words.word import Word

StatedWords = Set[tuple[str, str]]
"""Words that you set, each by its call and its name: no saving changes them."""
CACHE_STEP = sqrt(2)  # ratio of the bytes of consecutive cache sizes
Change = Callable[[ExecutionPlan], ExecutionPlan]
LARGE_TOKENS: Mapping[Backend, int] = MappingProxyType({"cuda": 2048, "cpu": 1})
"""From this many tokens per tensor-parallel part on, a micro-batch is large. In a small micro-batch a GPU waits for
kernel launches. The presets of five questions take 41.5 s by the estimate (geometric mean) with it, 53.2 s with 1, 41.7
s with 1,024 and 42.4 s with 4,096. A CPU launches no kernels."""


def with_changes(plan: ExecutionPlan, calls: Sequence[Call], **fields: object) -> ExecutionPlan:
    """Return the plan with some fields of these calls' placements changed."""
    names = {call.name for call in calls}

    def change(old: Placement) -> Placement:
        return having(old, {"device_order": (), **fields} if "strategy" in fields else fields)

    return replace(plan, placements=tuple((n, change(old) if n in names else old) for n, old in plan.placements))


@dataclass(frozen=True, slots=True)
class Savings:
    """The savings that a plan of `graph` may have; `stated` words are not changed.

    `workload` gives its rows, `backend` the kind of its devices.
    """

    graph: DataflowGraph
    workload: Workload
    backend: Backend
    stated: StatedWords = frozenset()
    _certificates: dict[object, Certificate] = field(default_factory=dict, init=False, repr=False, compare=False)
    _augmented: dict[object, AugmentedGraph] = field(default_factory=dict, init=False, repr=False, compare=False)

    def certificate(self, plan: ExecutionPlan) -> Certificate:
        """Return a plan's certificate, counted once."""
        key = plan.cluster, plan.placements
        if key not in self._certificates:
            self._certificates[key] = certify(self._augment(plan), self.workload, self.backend)
        return self._certificates[key]

    def _augment(self, plan: ExecutionPlan) -> AugmentedGraph:
        """Return the plan's nodes, made once for plans that differ only in how a call computes."""
        alone = [word for word in WORDS.values() if word.moves_nothing]
        alike = tuple((name, without(placed, alone)) for name, placed in plan.placements)
        key = plan.cluster, alike
        if key not in self._augmented:
            self._augmented[key] = augment_few(self.graph, plan)
        return replace(self._augmented[key], plan=plan)

    def fits(self, plan: ExecutionPlan) -> bool:
        """Whether the plan's certificate says that it fits."""
        return self.certificate(plan).fits

    def least(self, plan: ExecutionPlan, *, may_be_slow: bool = True) -> ExecutionPlan | None:
        """Return the plan with the fewest savings that make it fit; None if all of them together do not.

        Slow savings are used only if it `may_be_slow`.

        A saving reduces memory at some moments and increases it at no moment. So the plan with all savings needs the
        least memory of all plans with these meshes, strategies and engines: if it does not fit, no plan does. Bisection
        finds how many savings, in order, suffice. Then each of them is undone while the plan still fits, the slowest
        first. In the answer no call can have fewer micro-batches.
        """
        if self.fits(plan):
            return plan
        saving = self.all_of(plan, may_be_slow=may_be_slow)
        if not self.fits(saving[-1]):
            return None
        return self._relaxed(saving[bisect_left(saving, True, key=self.fits)], plan)

    def all_of(self, plan: ExecutionPlan, *, may_be_slow: bool = True) -> list[ExecutionPlan]:
        """Yield plans with more and more savings: each adds a saving to the plan before it."""
        found = [plan]
        for change in chain(self._fast(plan), self._slow(plan) if may_be_slow else ()):
            changed = change(found[-1])
            if changed != found[-1] and not any(sleepless(changed, self.graph)):
                found.append(changed)
        return found

    def _fast(self, plan: ExecutionPlan) -> Iterator[Change]:
        """Yield the savings that lose little, the fastest first."""
        others = [instance for instance in self._largest_first(plan) if instance not in self._trained(plan)]
        others.sort(key=lambda instance: self.graph.trained_by(instance.role) is not None)  # frozen copies first
        yield partial(self._in_most_micro_batches, least_tokens=LARGE_TOKENS[self.backend])
        yield from (partial(self._saving, word=word) for word in self._words("first") if word is not MICRO_BATCHES)
        yield self._with_enough_caches
        yield from (partial(self._offloading, instance=instance, part="all") for instance in others)
        yield from (partial(self._saving, word=word) for word in self._words("later"))

    def _slow(self, plan: ExecutionPlan) -> Iterator[Change]:
        """Yield the other savings, the fastest first."""
        yield self._in_most_micro_batches
        yield self._with_least_caches
        for part in ("optimizer", "all"):
            yield from (
                partial(self._offloading, instance=instance, part=part)
                for instance in self._largest_first(plan)
                if instance in self._trained(plan)
            )
        yield self._reloading_late

    def _trained(self, plan: ExecutionPlan) -> set[ModelInstance | None]:
        return {trained_instance(self.graph, plan, model.role) for model in self.graph.models}

    def _relaxed(self, plan: ExecutionPlan, before: ExecutionPlan) -> ExecutionPlan:
        """Return a plan that fits with fewer savings, as few as still fit; `before` is the plan without any."""
        plan = self._with_largest_caches(plan, before)
        plan = self._reloading_early(plan, before)
        for instance in reversed(list(instances(self.graph, plan))):
            plan = self._staying(plan, before, instance)
        for word in self._words("later")[::-1]:
            for call in self.graph:
                plan = self._saving_least(plan, before, call, word)
        for word in (word for word in self._words("first")[::-1] if word is not MICRO_BATCHES):
            plan = self._taken_back(plan, before, word, tuple(self.graph))
        trains_first = sorted(self.graph, key=lambda call: call.kind != "train_step")
        plan = self._taken_back(plan, before, MICRO_BATCHES, [c for c in trains_first if c.kind != "train_step"])
        for call in trains_first:
            plan = self._saving_least(plan, before, call, MICRO_BATCHES)
        return plan

    def is_free(self, plan: ExecutionPlan, call: Call, word: str) -> bool:
        """Whether the word is not stated for the call, or for a call that shares its copy (if the word is per copy)."""
        if not self.stated:
            return True
        names = [call.name]
        if word in WORDS and WORDS[word].of_copy:
            names = [other.name for calls in instances(self.graph, plan).values() if call in calls for other in calls]
        return not any((name, word) in self.stated for name in names)

    def _in_most_micro_batches(self, plan: ExecutionPlan, least_tokens: int = 1) -> ExecutionPlan:
        """The plan with the most micro-batches of at least `least_tokens` tokens for each tensor-parallel part."""
        for call in self.graph:
            placed = plan[call.name]
            if MICRO_BATCHES.may_have(call, placed.engine) and self.is_free(plan, call, MICRO_BATCHES.name):
                numbers = MICRO_BATCHES.values(call, placed, self.graph)
                tokens = numbers[-1] * call.rows_per_item * self.workload.mean_length
                least = least_tokens * placed.strategy.tp
                most = max((number for number in numbers if tokens >= number * least), default=1)
                plan = with_changes(plan, [call], micro_batches=max(most, placed.micro_batches))
        return plan

    @staticmethod
    def _words(saves: str) -> list[Word[Any]]:
        return [word for word in WORDS.values() if word.saves == saves]

    def _saving(self, plan: ExecutionPlan, word: Word[Any]) -> ExecutionPlan:
        """The plan with the least memory that a word gives to every call that may have it."""
        for call in self.graph:
            placed = plan[call.name]
            if word.may_have(call, placed.engine) and self.is_free(plan, call, word.name):
                plan = with_changes(plan, [call], **{word.name: word.values(call, placed, self.graph)[-1]})
        return plan

    def _saving_least(self, plan: ExecutionPlan, before: ExecutionPlan, call: Call, word: Word[Any]) -> ExecutionPlan:
        """The plan with the fastest value of a call's word with which it fits, of those since `before`."""
        now, was = word.of(plan[call.name]), word.of(before[call.name])
        if now == was:
            return plan
        values = word.faster(call, plan[call.name], self.graph)
        later = values[values.index(was) + 1 :] if was in values else [value for value in values if value > was]
        plans = [with_changes(plan, [call], **{word.name: value}) for value in (was, *later)]
        return (*plans, plan)[self._first_that_fits(plans)]

    def _first_that_fits(self, plans: Sequence[ExecutionPlan]) -> int:
        """Return the index of the first plan that fits, of plans that need less and less."""
        return 0 if plans and self.fits(plans[0]) else bisect_left(plans, True, key=self.fits)

    def _largest_first(self, plan: ExecutionPlan) -> list[ModelInstance]:
        """The copies of weights that may leave their devices, the largest first."""
        held = Counter[str]()
        for share in (share for peak in self.certificate(plan).peaks for share in peak.shares):
            held[share.owner] += share.num_bytes
        return sorted(instances(self.graph, plan), key=lambda instance: -held[instance.name])

    def _offloading(self, plan: ExecutionPlan, instance: ModelInstance, part: Offload) -> ExecutionPlan:
        """The plan with a part of a copy off its devices: a base that several copies hold once, with all of them.

        A base that a trained copy holds leaves when that copy does.
        """
        users = instances(self.graph, plan)
        together, trained = self._with_same_base(plan, instance) if part == "all" else [instance], self._trained(plan)
        if instance not in trained and not trained.isdisjoint(together):
            return plan
        calls = tuple(call for each in together for call in users[each])
        if plan[users[instance][0].name].offload == "all":
            return plan
        if not all(self.is_free(plan, users[each][0], "offload") for each in together):
            return plan
        return with_changes(plan, calls, offload=part)

    def _with_same_base(self, plan: ExecutionPlan, instance: ModelInstance) -> Sequence[ModelInstance]:
        return next((alike for alike in one_base(self.graph, plan) if instance in alike), (instance,))

    def _staying(self, plan: ExecutionPlan, before: ExecutionPlan, instance: ModelInstance) -> ExecutionPlan:
        """The plan with less of a copy off its devices, if it still fits."""
        users = instances(self.graph, plan)
        calls = users[instance]
        now, was = plan[calls[0].name], before[calls[0].name]
        if now.offload == was.offload:
            return plan
        together = self._with_same_base(plan, instance)
        if now.offload == "all" and len(together) > 1:
            return self._base_staying(plan, before, [users[each] for each in together])
        trains = any(call.kind == "train_step" for call in calls)
        parts: list[Offload] = [was.offload, *(["optimizer"] if trains and now.offload == "all" else [])]  # type: ignore[list-item]
        for part in parts:
            stays = with_changes(plan, calls, offload=part, prefetch=was.prefetch if part == "none" else now.prefetch)
            if self.fits(stays):
                return stays
        return plan

    def _base_staying(
        self, plan: ExecutionPlan, before: ExecutionPlan, copies: Sequence[tuple[Call, ...]]
    ) -> ExecutionPlan:
        """The plan with a base that several copies hold once on its devices, if it still fits."""
        for least in ("none", "optimizer"):
            stays = plan
            for calls in copies:
                was = before[calls[0].name]
                trains = any(call.kind == "train_step" for call in calls)
                offload = least if trains and was.offload == "none" else was.offload
                stays = with_changes(stays, calls, offload=offload, prefetch=was.prefetch)
            if self.fits(stays):
                return stays
        return plan

    def _reloading_late(self, plan: ExecutionPlan) -> ExecutionPlan:
        for calls in instances(self.graph, plan).values():
            if plan[calls[0].name].offload != "none" and self.is_free(plan, calls[0], "prefetch"):
                plan = with_changes(plan, calls, prefetch=False)
        return plan

    def _reloading_early(self, plan: ExecutionPlan, before: ExecutionPlan) -> ExecutionPlan:
        for calls in instances(self.graph, plan).values():
            was = before[calls[0].name].prefetch
            if plan[calls[0].name].prefetch != was:
                early = with_changes(plan, calls, prefetch=was)
                plan = early if self.fits(early) else plan
        return plan

    def _caches(self, plan: ExecutionPlan, calls: Sequence[Call]) -> list[float | None]:
        """The sizes of a copy's cache, the present one first, then smaller and smaller; the last holds a single row."""
        placed, sizes = plan[calls[0].name], ModelSizes.of(self.graph.model(calls[0].role or ""))
        tp, found = placed.strategy.tp, [placed.cache_gib]
        length, rows = self.workload.longest, _rows_of_a_replica(placed, calls)
        num_bytes = placed.cache_bytes or whole_cache_bytes(rows, length, sizes, tp)
        least = gib_above(whole_cache_bytes(1, length, sizes, tp))
        while (size := gib_above(num_bytes := int(num_bytes / CACHE_STEP))) > least:
            found.append(size)
        return [*found, least] if placed.cache_gib is None or least < placed.cache_gib else found

    def _cached(self, plan: ExecutionPlan) -> Iterator[tuple[Call, ...]]:
        """The calls of each copy with a cache whose size is not stated."""
        for instance, calls in instances(self.graph, plan).items():
            if TRAITS[instance.engine].paged_cache and self.is_free(plan, calls[0], "cache_gib"):
                yield calls

    def _with_enough_caches(self, plan: ExecutionPlan) -> ExecutionPlan:
        """The plan with caches that are no larger than their rows are expected to fill."""
        for calls in self._cached(plan):
            placed, sizes = plan[calls[0].name], ModelSizes.of(self.graph.model(calls[0].role or ""))
            rows, tp = _rows_of_a_replica(placed, calls), placed.strategy.tp
            enough = gib_above(expected_cache_bytes(rows, self.workload, sizes, tp))
            most = placed.cache_gib or gib_above(whole_cache_bytes(rows, self.workload.longest, sizes, tp))
            plan = with_changes(plan, calls, cache_gib=enough) if enough < most else plan
        return plan

    def _with_least_caches(self, plan: ExecutionPlan) -> ExecutionPlan:
        for calls in self._cached(plan):
            plan = with_changes(plan, calls, cache_gib=self._caches(plan, calls)[-1])
        return plan

    def _with_largest_caches(self, plan: ExecutionPlan, before: ExecutionPlan) -> ExecutionPlan:
        for calls in self._cached(plan):
            now = plan[calls[0].name].cache_gib
            if now is not None and now != before[calls[0].name].cache_gib:
                sizes = [size for size in self._caches(before, calls)[:-1] if size is None or size > now]
                plans = [with_changes(plan, calls, cache_gib=size) for size in sizes]
                plan = (*plans, plan)[self._first_that_fits(plans)]
        return plan

    def _taken_back(
        self, plan: ExecutionPlan, before: ExecutionPlan, word: Word[Any], calls: Sequence[Call]
    ) -> ExecutionPlan:
        """The plan with a word of all these calls as it was before, if it still fits."""
        back = plan
        for call in calls:
            back = with_changes(back, [call], **{word.name: word.of(before[call.name])})
        return back if back == plan or self.fits(back) else plan


def _rows_of_a_replica(placed: Placement, calls: Sequence[Call]) -> int:
    return max(call.most_items(placed.strategy.dp) * call.rows_per_item for call in calls)
