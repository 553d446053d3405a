"""What each other choice for one call would cost, as all others are: for ranking, before the few best are estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, compiled
from prefect_rlhf.placement.search.partial.complete import (
    OVERFLOW_FACTOR,
    CompletePlan,
    empty_complete_plan,
    evaluate,
    fits,
)
from prefect_rlhf.placement.search.problem import Choice, Plan, Problem
from prefect_rlhf.placement.search.tables.tables import Tables, build_tables


@dataclass(frozen=True, slots=True)
class Alternative:
    """`has_room` is whether every device has memory enough by the problem's count."""

    choice: Choice
    makespan_us: int
    has_room: bool


def alternatives(problem: Problem, plan: Plan) -> Mapping[str, tuple[Alternative, ...]]:
    """Of each call: every option on every mesh, the fastest first; of meshes that lie alike to the others', one.

    What the plan chose is among them.
    """
    tables = build_tables(problem)
    placed = _placed(tables, problem, plan)
    return {call.name: _of_call(problem, tables, placed, plan, index) for index, call in enumerate(problem.calls)}


def _of_call(problem: Problem, t: Tables, placed: CompletePlan, plan: Plan, index: int) -> tuple[Alternative, ...]:
    call = problem.calls[index]
    kept = plan[call.name]
    others = [choice.mesh for name, choice in plan.items() if name != call.name]
    different = [_different(problem, members, kept.mesh, others) for members in problem.mesh_classes]
    pairs = [(option, mesh) for option, one in enumerate(call.options) for mesh in different[one.mesh_class]]
    options, meshes = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    costs, room = np.zeros(len(pairs), dtype=np.int64), np.zeros(len(pairs), dtype=np.int64)
    cost_each(t, placed, index, options, meshes, costs, room)
    placed.option[index], placed.mesh[index] = kept.option, kept.mesh
    found = zip(pairs, costs.tolist(), room.tolist(), strict=True)
    return tuple(sorted((Alternative(Choice(*pair), us, bool(fit)) for pair, us, fit in found), key=_makespan))


def _makespan(one: Alternative) -> int:
    return one.makespan_us


@compiled
def cost_each(t: Tables, p: CompletePlan, call: int, options: Ints, meshes: Ints, costs: Ints, room: Ints) -> None:
    """Fill `costs` with makespans and `room` with 1 where no device overflows; leaves the last choice in `p`."""
    for index in range(len(options)):
        p.option[call], p.mesh[call] = options[index], meshes[index]
        cost = evaluate(t, p)
        room[index] = 1 if fits(t, p) else 0
        costs[index] = cost if room[index] else cost // OVERFLOW_FACTOR


def _different(problem: Problem, members: tuple[int, ...], kept: int, others: list[int]) -> list[int]:
    """One mesh of a class for each way to lie to the other calls' meshes, and rather the one that the plan has."""
    found: dict[tuple[int, ...], int] = {}
    for mesh in sorted(members, key=lambda mesh: mesh != kept):
        here = problem.meshes[mesh]
        lies = tuple(2 if mesh == other else int(here.overlaps(problem.meshes[other])) for other in others)
        found.setdefault(lies, mesh)
    return list(found.values())


def _placed(t: Tables, problem: Problem, plan: Plan) -> CompletePlan:
    placed = empty_complete_plan(t)
    placed.option[:] = [plan[call.name].option for call in problem.calls]
    placed.mesh[:] = [plan[call.name].mesh for call in problem.calls]
    return placed
