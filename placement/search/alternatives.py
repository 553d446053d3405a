"""Ranks other choices by makespan, for one call or for several together, with all other calls as planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, compiled
from prefect_rlhf.placement.search.partial.complete import (
    INFINITE,
    OVERFLOW_FACTOR,
    CompletePlan,
    empty_complete_plan,
    evaluate,
    fill_relations,
    fits,
    own_bound,
    time_of,
)
from prefect_rlhf.placement.search.problem import Choice, Plan, Problem
from prefect_rlhf.placement.search.rules.run_order import RunOrder
from prefect_rlhf.placement.search.tables.tables import Tables, build_tables


@dataclass(frozen=True, slots=True)
class Alternative:
    """A choice for a call. `has_room` is whether every device has enough memory, as the problem counts it."""

    choice: Choice
    makespan_us: int
    has_room: bool


def alternatives(problem: Problem, plan: Plan, most_us: int = INFINITE) -> Mapping[str, Iterator[Alternative]]:
    """Rank for each call every option on every mesh, the fastest first; of equivalent meshes only the first.

    Choices that take longer than `most_us` are left out; for most of them a bound suffices, without a schedule. The
    plan's own choice is ranked like the others. Meshes are equivalent if they have the same relations to the other
    calls' meshes.
    """
    tables = build_tables(problem, RunOrder)
    complete = empty_complete_plan(tables)
    complete.option[:] = [plan[call.name].option for call in problem.calls]
    complete.mesh[:] = [plan[call.name].mesh for call in problem.calls]
    return {
        call.name: _of_call(problem, tables, complete, plan, index, most_us) for index, call in enumerate(problem.calls)
    }


def timed_together(
    problem: Problem, plan: Plan, calls: Sequence[str], changes: Sequence[Sequence[Choice]]
) -> list[tuple[int, bool]]:
    """Return the makespan for each change of the `calls`, and whether every device then has enough memory."""
    tables, index = build_tables(problem, RunOrder), {call.name: number for number, call in enumerate(problem.calls)}
    complete = empty_complete_plan(tables)
    planned = [(plan[call.name].option, plan[call.name].mesh) for call in problem.calls]
    choices = np.repeat(np.array(planned, dtype=np.int64)[None], len(changes), axis=0)
    changed = [[(choice.option, choice.mesh) for choice in change] for change in changes]
    choices[:, [index[name] for name in calls]] = np.array(changed, dtype=np.int64).reshape(-1, len(calls), 2)
    makespans, room = np.zeros(len(changes), dtype=np.int64), np.zeros(len(changes), dtype=np.int64)
    fill_together(tables, complete, choices, makespans, room)
    return [(us, bool(has_room)) for us, has_room in zip(makespans.tolist(), room.tolist(), strict=True)]


def _of_call(
    problem: Problem, t: Tables, complete: CompletePlan, plan: Plan, index: int, most_us: int
) -> Iterator[Alternative]:
    call = problem.calls[index]
    planned = plan[call.name]
    others = [choice.mesh for name, choice in plan.items() if name != call.name]
    meshes_of = [unlike(problem, members, planned.mesh, others) for members in problem.mesh_classes]
    counts = [len(meshes_of[option.mesh_class]) for option in call.options]
    options = np.repeat(np.arange(len(counts)), counts)
    meshes = np.array([mesh for option in call.options for mesh in meshes_of[option.mesh_class]], dtype=np.int64)
    makespans, room = np.zeros(len(options), dtype=np.int64), np.zeros(len(options), dtype=np.int64)
    fill_makespans(t, complete, index, options, meshes, most_us, makespans, room)
    complete.option[index], complete.mesh[index] = planned.option, planned.mesh
    fastest_first = np.argsort(makespans, kind="stable")[: np.count_nonzero(makespans <= most_us)]
    ranked = (column[fastest_first].tolist() for column in (options, meshes, makespans, room))
    return (
        Alternative(Choice(option, mesh), us, bool(has_room))
        for option, mesh, us, has_room in zip(*ranked, strict=True)
    )


@compiled
def fill_makespans(
    t: Tables, p: CompletePlan, call: int, options: Ints, meshes: Ints, most_us: int, makespans: Ints, room: Ints
) -> None:
    """Fill `makespans`, and `room` with 1 if no device overflows; leaves the last choice in `p`.

    A makespan beyond `most_us` may be too small, and counts as without room.
    """
    for index in range(len(options)):
        p.option[call], p.mesh[call] = options[index], meshes[index]
        fill_relations(t, p)
        makespans[index] = own_bound(t, p, most_us + 1)
        if makespans[index] <= most_us:
            makespans[index] = time_of(t, p)
            room[index] = 1 if fits(t, p) else 0


@compiled
def fill_together(t: Tables, p: CompletePlan, choices: Ints, makespans: Ints, room: Ints) -> None:
    """The same for whole plans: `choices` are option and mesh, [plans, calls, 2]."""
    for index in range(len(choices)):
        for call in range(t.num_calls):
            p.option[call], p.mesh[call] = choices[index, call, 0], choices[index, call, 1]
        cost = evaluate(t, p)
        room[index] = 1 if fits(t, p) else 0
        makespans[index] = cost if room[index] else cost // OVERFLOW_FACTOR


def unlike(problem: Problem, members: tuple[int, ...], planned: int, others: list[int]) -> list[int]:
    """Return a class's mesh for each combination of relations to the `others`; the planned mesh is preferred."""
    by_relations: dict[tuple[int, ...], int] = {}
    for number in sorted(members, key=lambda number: number != planned):
        mesh = problem.meshes[number]
        relations = tuple(2 if number == other else int(mesh.overlaps(problem.meshes[other])) for other in others)
        by_relations.setdefault(relations, number)
    return list(by_relations.values())
