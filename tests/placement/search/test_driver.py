"""One loop for all searches: budget, interrupt, progress, and the same answer for the same work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numba
import pytest

from benchmarks.closed_problem import load_closed_problem, read_closed_problem
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.partial.incumbent import SearchOutcome
from prefect_rlhf.placement.search.problem import Edge, Interval, LinkNode, Option, PlannedCall, Problem
from prefect_rlhf.placement.search.tables.tables import build_tables
from prefect_rlhf.placement.strategy import Strategy
from tests.placement.search import plain
from tests.placement.search.clusters import closed_file, safe_ppo
from tests.placement.search.random_problems import random_problem

DATA = Path(__file__).resolve().parents[1] / "data"
METHODS = ["exact", "metropolis-hastings"]


@pytest.fixture(scope="module")
def large() -> Problem:
    return load_closed_problem(DATA / "ppo_70b_7b_16x8.json.gz").problem


def test_all_problems_are_of_one_type_for_the_compiled_code(large):
    """Another type of array would compile everything anew, a minute of a user's time."""
    problems = [large, two_calls(), *map(random_problem, range(200))]
    assert len({numba.typeof(build_tables(problem)) for problem in problems}) == 1


def two_calls(memory: int = 100) -> Problem:
    """A generation and a training on one or two devices; two of either at once do not fit one device."""
    one, two = Option(Strategy(), 0, 8, 10, 60), Option(Strategy(dp=2), 1, 5, 10, 60)
    return Problem(
        name="two calls",
        device_bytes=(memory,) * 2,
        meshes=(Interval(0, 1, "left"), Interval(1, 2, "right"), Interval(0, 2, "both")),
        mesh_classes=((0, 1), (2,)),
        nodes=tuple(PlannedCall(name, "actor", name, (one, two)) for name in ("generate", "train")),
        edges=(Edge("generate", "train"), Edge("train", "generate", lag=1)),
        iterations=3,
    )  # fmt: skip


def test_on_policy_calls_alternate_on_all_devices():
    """Nothing can run at the same time, so each call takes both devices: a chain of 10 microseconds an iteration."""
    result = search(two_calls(), 60)
    assert pytest.approx((result.makespan_seconds, result.period_seconds)) == (30e-6, 10e-6)
    assert result.binding == "chain: generate -> train"
    assert (result.proved_optimal, result.gap) == (True, 0.0)


def test_with_staleness_two_halves_work_at_the_same_time():
    """With lag 2 the generation of one iteration overlaps the training of the one before: of all plans the best."""
    problem = two_calls()
    stale = replace(problem, edges=(Edge("generate", "train"), Edge("train", "generate", lag=2)), iterations=6)
    result = search(stale, 60)
    best = min(plain.makespan(stale, plan) for plan in plain.every_plan(stale) if plain.fits(stale, plan))
    assert best == round(result.makespan_seconds * 1e6)
    assert result.period_seconds < search(problem, 60).period_seconds


def test_a_reload_occupies_the_host_link_alone():
    """It delays what waits for it, not what runs on the same devices meanwhile."""
    problem = two_calls()
    nodes = (problem.nodes[0], LinkNode("reload", "train", (4, 4)), problem.nodes[1])
    beside = replace(problem, nodes=nodes, edges=(*problem.edges, Edge("reload", "train")), iterations=1)
    between = replace(beside, edges=(*beside.edges, Edge("generate", "reload")))
    assert pytest.approx(search(beside, 60).makespan_seconds) == 10e-6
    assert pytest.approx(search(between, 60).makespan_seconds) == 14e-6


def test_what_fits_nowhere_is_infeasible():
    """An outcome, not an exception: the caller knows which field to blame."""
    result = search(two_calls(memory=50), 60)
    assert (SearchOutcome.INFEASIBLE, None, float("inf")) == (result.outcome, result.plan, result.makespan_seconds)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_work_gives_the_same_plan(large, method):
    """Neither time nor an earlier search has a say."""
    first, second = (search(large, 600, method, max_evaluations=30_000) for _ in range(2))
    assert replace(first, cpu_seconds=0) == replace(second, cpu_seconds=0)


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_from_the_keyboard_keeps_the_best_plan_so_far(method):
    """As Ctrl-C does, wherever the loop is. The gap says how good the plan is: the best takes 62.350 s."""
    problem = read_closed_problem(closed_file(safe_ppo(13, 7), num_nodes=4, batch=256)).problem

    def interrupt(progress):
        if progress.makespan_seconds is not None:
            raise KeyboardInterrupt

    result = search(problem, 600, method, progress=interrupt)
    assert (result.outcome, result.plan is not None) == (SearchOutcome.INTERRUPTED, True)
    assert result.makespan_seconds >= 62.349
    assert result.lower_bound_seconds <= 62.351
    assert result.gap > 0


def test_progress_only_gets_better(large):
    """Plans get faster, the bound rises, and the last line is the result."""
    seen = []
    result = search(large, 600, max_evaluations=300_000, progress=seen.append)
    spans = [p.makespan_seconds for p in seen if p.makespan_seconds is not None]
    assert sorted(spans, reverse=True) == spans
    assert sorted(p.lower_bound_seconds for p in seen) == [p.lower_bound_seconds for p in seen]
    assert seen[-1].makespan_seconds == result.makespan_seconds
    assert f"{result.makespan_seconds:.3f} s" in str(seen[-1])


def test_it_ends_at_the_gap_that_was_asked_for(large):
    """No work is spent on what does not matter."""
    result = search(large, 600, max_gap=0.5)
    assert SearchOutcome.WITHIN_GAP is result.outcome
    assert result.gap <= 0.5


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_must_be_positive(budget):
    with pytest.raises(InvalidInput, match="budget_seconds"):
        search(two_calls(), budget)


def test_a_method_that_does_not_exist_is_named():
    with pytest.raises(InvalidInput, match="method: got 'guess', expected exact or metropolis-hastings"):
        search(two_calls(), 1, method="guess")
