"""Placement words that you state together with a plan's name, as in `placement.actor_train.micro_batches=16`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput, NotUsed, SeveralMistakes
from prefect_rlhf.placement.devices.axes import OFFERED
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan, Placement, instances
from prefect_rlhf.placement.plans.plan_file import leased_mesh
from prefect_rlhf.placement.words.table import WORDS, having
from prefect_rlhf.placement.words.word import shown

Words = Mapping[str, Mapping[str, Any]]
"""Values of words by call; the words are those of a call in a plan file."""
NO_WORDS: Words = MappingProxyType({})


def check_calls(words: Words, graph: DataflowGraph) -> None:
    """Raise InvalidInput for a call that is not in the graph."""
    calls = [call.name for call in graph]
    for name in words:
        if name not in calls:
            raise InvalidInput("placement", name, f"a call of flow {graph.name}: {', '.join(calls)}")


def names_of(words: Words) -> Set[tuple[str, str]]:
    """Return each stated word as (call, word)."""
    return frozenset((call, word) for call, values in words.items() for word in values)


def stated_mesh(words: Words, call: str, cluster: ClusterShape) -> DeviceMesh | None:
    """Return the mesh stated for a call, or None. Raises InvalidInput unless it lies in the lease."""
    name = words.get(call, {}).get("mesh")
    return None if name is None else leased_mesh(name, cluster, f"placement.{call}.mesh")


def has_degrees(words: Words, call: str) -> bool:
    """Whether a degree of the call's strategy is stated."""
    return any(axis in words.get(call, {}) for axis in OFFERED)


def agreeing(strategies: Iterator[Strategy], words: Words, call: str) -> Iterator[Strategy]:
    """Yield the strategies with the degrees stated for a call; a stated `ep` is added."""
    values = words.get(call, {})
    degrees = {axis: values[axis] for axis in OFFERED if axis in values}
    for strategy in strategies:
        spread = replace(strategy, ep=degrees.get("ep", strategy.ep))
        if all(getattr(spread, axis) == degree for axis, degree in degrees.items()):
            yield spread


def with_values(placement: Placement, words: Words, call: str) -> Placement:
    """Return a placement with the words stated for its call, except for mesh and degrees."""
    values = dict(words.get(call, {}))
    order = values.pop("order", None)
    fields = {word: value for word, value in values.items() if word not in (*OFFERED, "mesh")}
    return having(placement, fields | ({} if order is None else {"device_order": tuple(order)}))


def with_words(plan: ExecutionPlan, graph: DataflowGraph, words: Words) -> ExecutionPlan:
    """Return a plan with the stated words in place of its own. Raises InvalidInput for contradictory words."""
    if not words:
        return plan
    check_calls(words, graph)
    placements = []
    for name, placed in plan.placements:
        values = words.get(name, {})
        degrees = {axis: values[axis] for axis in OFFERED if axis in values}
        mesh = stated_mesh(words, name, plan.cluster) or placed.mesh
        moved = replace(placed, mesh=mesh, strategy=replace(placed.strategy, **degrees))
        moved = moved if (moved.mesh, moved.strategy) == (placed.mesh, placed.strategy) else _unordered(moved)
        placements.append((name, with_values(moved, words, name)))
    return with_shared_words(replace(plan, placements=tuple(placements)), graph, words)


def with_shared_words(plan: ExecutionPlan, graph: DataflowGraph, words: Words) -> ExecutionPlan:
    """Apply words stated for a call to the other calls with its copy of weights, too.

    Raises InvalidInput, which names both words, if different values are stated for two of these calls.
    """
    placements = dict(plan.placements)
    for instance, calls in instances(graph, plan).items():
        for word in (word.name for word in WORDS.values() if word.of_copy):
            stated = [(call, words[call.name][word]) for call in calls if word in words.get(call.name, {})]
            for call, value in stated[1:]:
                first, common = stated[0]
                if value != common:
                    right = f"{shown(common)}, as placement.{first.name}.{word}: both use the copy {instance.name}"
                    raise InvalidInput(f"placement.{call.name}.{word}", value, right)
            for call in calls if stated else ():
                placements[call.name] = having(placements[call.name], {word: stated[0][1]})
    return replace(plan, placements=tuple(placements.items()))


def as_stated(error: InvalidInput, words: Words) -> InvalidInput:
    """Turn an error about a plan's words into an error about the parameter that states them."""
    if isinstance(error, SeveralMistakes):
        return SeveralMistakes.of([as_stated(mistake, words) for mistake in error.mistakes], error.remedy)
    call, _, word = error.field.removeprefix("plan.calls.").partition(".")
    if not error.field.startswith("plan.calls.") or call not in words:
        return error
    field = f"placement.{call}.{word}" if word else f"placement.{call}"
    if isinstance(error, NotUsed):
        return NotUsed(field, error.seen, *error.args[2:])
    return InvalidInput(field, error.seen, error.expected)


def flags(before: ExecutionPlan, after: ExecutionPlan, graph: DataflowGraph) -> str:
    """Return the words that differ between two plans as command-line flags; a word of a copy appears once."""
    found, shared = list[str](), set[tuple[object, str]]()
    copies = {call.name: copy for copy, calls in instances(graph, after).items() for call in calls}
    for name, placed in after.placements:
        for word, value in _differing(before[name], placed):
            if word in WORDS and WORDS[word].of_copy:
                if (copies.get(name), word) in shared:
                    continue
                shared.add((copies.get(name), word))
            found.append(flag(name, word, value))
    return " ".join(found)


def flag(call: str, word: str, value: object) -> str:
    """Return a word as a command-line flag.

    >>> flag("actor_train", "prefetch", False)
    '-p placement.actor_train.prefetch=false'
    """
    return f"-p placement.{call}.{word}={shown(value)}"


def value_of(placed: Placement, word: str) -> object:
    """Return a word's value in a placement."""
    if word in OFFERED:
        return getattr(placed.strategy, word)
    return WORDS[word].of(placed) if word in WORDS else getattr(placed, word)


def _differing(before: Placement, after: Placement) -> Iterator[tuple[str, object]]:
    for word in (*OFFERED, *WORDS):
        if (value := value_of(after, word)) != value_of(before, word):
            yield word, value


def _unordered(placed: Placement) -> Placement:
    return replace(placed, device_order=())
