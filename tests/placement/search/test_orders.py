"""The bound counts both orders of a train_step and a call on common devices: no order of a plan's nodes beats it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.search.driver import prove
from prefect_rlhf.placement.search.exact.binding import binding_term
from prefect_rlhf.placement.search.problem import (
    Choice,
    ComputeNode,
    Edge,
    LinkNode,
    Option,
    PairNode,
    PlannedCall,
    Problem,
)
from prefect_rlhf.placement.search.rules.run_order import RunOrder
from prefect_rlhf.placement.search.tables.tables import build_tables
from tests.placement.search.plain_orders import can_repeat, jobs_of, least_period
from tests.placement.search.random_problems import MESHES, random_problem
from tests.placement.search.test_bound import as_incumbent, own_bound, sample_of_plans
from tests.support.cases import examples

CLASSES = tuple((mesh,) for mesh in range(len(MESHES)))
WHOLE = len(MESHES) - 1
TIMES = st.integers(1, 12)


def iteration(
    calls: dict[str, tuple[int, int]],
    links: dict[str, tuple[int, int]],
    waits: list[Edge],
    peaks: dict[str, int] | None = None,
    move: int = 0,
    compute: int = 1,
) -> Problem:
    """A generation, a critic's train_step for the iteration before, inferences, and the actor's train_step.

    `calls` are by name the mesh and the microseconds, `links` those of a reload and an offload.
    """
    trains = {"critic_train", "train"}
    nodes: list[PlannedCall | LinkNode | ComputeNode | PairNode] = []
    edges = list(waits)
    for name, (mesh, us) in calls.items():
        if name == "train":
            nodes.append(ComputeNode("advantages", compute))
        if name == "generate" and move:
            nodes.append(PairNode("move", "train", "generate", "both", np.full((1, 1), move, dtype=np.int64)))
            edges += [Edge("train", "move", 1), Edge("move", "generate"), Edge("move", "train")]
        around = [f"reload {name}", name, f"offload {name}"] if name in links else [name]
        option = Option(Strategy(), mesh, us, 0, (peaks or {}).get(name, 0), None, 0, 20 if name in links else 0)
        kind = "train_step" if name in trains else "inference"
        made = [PlannedCall(name, f"role of {name}", kind, (option,))]
        if name in links:
            made = [LinkNode(around[0], name, links[name][:1]), *made, LinkNode(around[2], name, links[name][1:])]
            edges += [Edge(around[0], name), Edge(name, around[2]), Edge(around[2], around[0], 1)]
        nodes += made
    order = list(calls)
    return Problem(
        name="iteration",
        device_bytes=(100,) * 4,
        meshes=MESHES,
        mesh_classes=CLASSES,
        nodes=tuple(nodes),
        edges=tuple(dict.fromkeys(edges)),
        iterations=16,
        visits_after={(a, b): int(order.index(a) > order.index(b)) for a in order for b in order if a != b},
        counts_orders=True,
    )


def only_plan(problem: Problem) -> dict[str, Choice]:
    return {call.name: Choice(0, call.options[0].mesh_class) for call in problem.calls}


def waits(inferences: list[str]) -> list[Edge]:
    """What each waits for in an iteration: all inferences for the generation, the last one for the critic as well."""
    first = [Edge("generate", name) for name in inferences]
    return [
        *first,
        *(Edge(name, "advantages") for name in inferences),
        Edge("advantages", "train"),
        Edge("train", "generate", 1),
        Edge("advantages", "critic_train", 1),
        Edge("critic_train", inferences[-1]),
    ]


@st.composite
def iterations(draw: st.DrawFn) -> Problem:
    """Iterations with waits left out, and with models that come and go."""
    inferences = [f"inference{index}" for index in range(draw(st.integers(1, 3)))]
    names = ["generate", "critic_train", *inferences, "train"]
    meshes = st.sampled_from([WHOLE, WHOLE, 4, 5, *range(len(MESHES))])
    calls = {name: (draw(meshes), draw(TIMES)) for name in names}
    links = {name: (draw(TIMES), draw(TIMES)) for name in names if draw(st.integers(0, 3)) < 1 + 2 * ("train" in name)}
    kept = [edge for edge in waits(inferences) if draw(st.integers(0, 7))]
    peaks = {name: draw(st.sampled_from([0, 0, 90])) for name in names}
    return iteration(calls, links, kept, peaks, draw(st.sampled_from([0, 3])))


def in_words(problem: Problem) -> str:
    tables = build_tables(problem, RunOrder)
    return binding_term(problem, tables, as_incumbent(problem, only_plan(problem)))


def bounds(problem: Problem) -> tuple[int, int]:
    """The bounds of a problem's only plan: without orders, and with them."""
    plan, without = only_plan(problem), replace(problem, counts_orders=False)
    return own_bound(without, build_tables(without, RunOrder), plan), own_bound(
        problem, build_tables(problem, RunOrder), plan
    )


CALLS = {"generate": (4, 20), "critic_train": (5, 21), "score": (WHOLE, 4), "values": (5, 3), "train": (WHOLE, 10)}
LINKS = {"critic_train": (3, 3), "train": (2, 2)}


def test_an_inference_on_all_devices_waits_for_the_critic_or_the_critic_for_the_generation():
    """The critic reloads after the actor's train_step has ended, so neither copy runs beside the inference."""
    problem = iteration(CALLS, LINKS, waits(["score", "values"]), move=1)
    jobs = jobs_of(problem, only_plan(problem))
    in_a_row = 2 + 3 + 21 + 4 + 3 + 1 + 10  # offload, reload, critic_train, score, values, advantages, train
    assert bounds(problem) == (41, in_a_row)
    assert [least_period(jobs, times) for times in (1, 2)] == [in_a_row] * 2
    assert in_words(problem) == (
        "device load of critic_train + score + values + advantages + train with 2 moves, in the best order of calls on "
        "common devices"
    )
    assert round(prove(problem, 1.0).lower_bound_seconds * 1e6) == in_a_row


@settings(max_examples=examples(60), deadline=None)
@given(iterations(), st.sampled_from([1, 2]), st.booleans())
def test_no_order_of_an_iteration_repeats_sooner_than_the_bound(problem, times, in_parts):
    """Neither the same order in every iteration nor two in turn, with calls in one part or in two."""
    jobs = jobs_of(problem, only_plan(problem), in_parts)
    for bound in bounds(problem):
        assert not can_repeat(jobs, bound - 1, times)


@pytest.mark.parametrize("seed", range(60))
def test_no_order_of_a_random_problem_repeats_sooner_than_the_bound(seed):
    """Every other of its nodes trains if it is a call."""
    lasting = random_problem(seed, RunOrder)
    nodes = [replace(node, kind=("train_step", "inference")[index % 2]) if isinstance(node, PlannedCall) else node
             for index, node in enumerate(lasting.nodes)]  # fmt: skip
    problem = replace(lasting, nodes=tuple(nodes), counts_orders=True)
    tables = build_tables(problem, RunOrder)
    for plan in sample_of_plans(problem, seed, 3):
        bound = own_bound(problem, tables, plan)
        for in_parts in (False, True):
            assert not can_repeat(jobs_of(problem, plan, in_parts), bound - 1), plan


def test_a_train_step_between_the_parts_of_a_call_is_no_order_of_whole_calls():
    """What waits for it then runs beside the last part, so the bound does not take the call as a whole."""
    calls = {"generate": (4, 8), "critic_train": (WHOLE, 8), "score": (4, 12), "values": (5, 6), "train": (WHOLE, 4)}
    problem = iteration(calls, LINKS | {"critic_train": (12, 3)}, waits(["score", "values"]))
    whole, parts = (jobs_of(problem, only_plan(problem), in_parts) for in_parts in (False, True))
    assert bounds(problem)[1] <= least_period(parts, 1) < least_period(whole, 1)


def test_orders_raise_the_bounds_of_many_iterations():
    """If they raised none, the tests above would prove nothing about orders."""
    raised = 0
    for index in range(30):
        calls = {name: (mesh, us + index * (name == "generate")) for name, (mesh, us) in CALLS.items()}
        before, now = bounds(iteration(calls, LINKS, waits(["score", "values"]), move=1))
        raised += now > before
        assert now >= before
    assert raised >= 5
