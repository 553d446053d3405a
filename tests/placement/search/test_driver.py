"""One loop for all searches: budget, interrupt, progress, and the same answer for the same work."""

from dataclasses import replace
from pathlib import Path

import numba
import numpy as np
import pytest

from benchmarks.planner.closed_problem import load_closed_problem, read_closed_problem
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.schedule.list_schedule import Job, job_spans
from prefect_rlhf.placement.search.driver import search
from prefect_rlhf.placement.search.partial.incumbent import SearchOutcome
from prefect_rlhf.placement.search.problem import Edge, Interval, LinkNode, Option, PairNode, PlannedCall, Problem
from prefect_rlhf.placement.search.rules.ready_first import ReadyFirst, period_seconds
from prefect_rlhf.placement.search.rules.run_order import RunOrder
from prefect_rlhf.placement.search.tables.tables import build_tables
from tests.placement.search import plain
from tests.placement.search.clusters import closed_file, safe_ppo
from tests.placement.search.random_problems import random_problem

DATA = Path(__file__).resolve().parents[1] / "data"
METHODS = ["exact", "metropolis-hastings"]


@pytest.fixture(scope="module")
def large() -> Problem:
    return load_closed_problem(DATA / "ppo_70b_7b_16x8.json.gz").problem


def test_all_problems_have_the_same_compiled_type(large):
    """Another type of array would compile everything anew, a minute of a user's time. Only a rule has its own code."""
    problems = [large, two_calls(), *map(random_problem, range(200))]
    by_real = {numba.typeof(build_tables(problem, ReadyFirst)) for problem in problems}
    by_run = {numba.typeof(build_tables(random_problem(seed, RunOrder), RunOrder)) for seed in range(200)}
    assert (len(by_real), len(by_run), len(by_real | by_run)) == (1, 1, 2)


def two_calls(memory: int = 100, iterations: int = 12) -> Problem:
    """A generation and a training on one or two devices; two of either at once do not fit one device."""
    one, two = Option(Strategy(), 0, 8, 10, 60), Option(Strategy(dp=2), 1, 5, 10, 60)
    return Problem(
        name="two calls",
        device_bytes=(memory,) * 2,
        meshes=(Interval(0, 1, "left"), Interval(1, 2, "right"), Interval(0, 2, "both")),
        mesh_classes=((0, 1), (2,)),
        nodes=tuple(PlannedCall(name, "actor", name, (one, two)) for name in ("generate", "train")),
        edges=(Edge("generate", "train"), Edge("train", "generate", lag=1)),
        iterations=iterations,
    )  # fmt: skip


def test_on_policy_calls_alternate_on_all_devices():
    """Nothing can run at the same time, so each call takes both devices: a chain of 10 microseconds an iteration."""
    problem = two_calls(iterations=3)
    result = search(problem, 60, rule=ReadyFirst)
    assert pytest.approx((result.seconds, period_seconds(problem, result.plan))) == (30e-6, 10e-6)
    assert result.binding == "chain: generate -> train"
    assert (result.proved_optimal, result.gap) == (True, 0.0)


def test_with_staleness_two_halves_work_at_the_same_time():
    """With lag 2 the generation of one iteration overlaps the training of the one before: of all plans the best."""
    problem = two_calls(iterations=3)
    stale = replace(problem, edges=(Edge("generate", "train"), Edge("train", "generate", lag=2)), iterations=6)
    result = search(stale, 60, rule=ReadyFirst)
    best = min(plain.makespan(stale, plan) for plan in plain.every_plan(stale) if plain.fits(stale, plan))
    assert best == round(result.seconds * 1e6)
    in_turn = search(problem, 60, rule=ReadyFirst)
    assert period_seconds(stale, result.plan) < period_seconds(problem, in_turn.plan)


def test_the_run_follows_graph_order_and_reals_rule_the_ready_node():
    """Five calls whose devices are given: 13 s by the run's rule. By ReaL's the fourth, ready first, delays the third.

    What another rule would do bounds nothing: below 13 s no order gets, since so long the first device works.
    """
    runs = [("first", "0", 3), ("second", "0", 2), ("third", "0", 3), ("fourth", "0", 5), ("fifth", "2", 2)]
    problem = Problem(
        name="five calls",
        device_bytes=(1,) * 3,
        meshes=(Interval(0, 1, "0"), Interval(2, 3, "2")),
        mesh_classes=((0,), (1,)),
        nodes=tuple(
            PlannedCall(name, None, "inference", (Option(Strategy(), int(where != "0"), seconds * 10**6, 0, 0),))
            for name, where, seconds in runs
        ),
        edges=(Edge("first", "third"), Edge("second", "third"), Edge("first", "fourth"), Edge("third", "fifth")),
        iterations=12,
    )
    by_run, by_real = search(problem, 60), search(replace(problem, iterations=1), 60, rule=ReadyFirst)
    assert (by_run.seconds, by_run.lower_bound_seconds, by_run.proved_optimal) == (13.0, 13.0, True)
    assert (by_real.seconds, by_real.proved_optimal) == (15.0, True)
    jobs = [Job(0b1, 3.0), Job(0b1, 2.0), Job(0b1, 3.0, (0, 1)), Job(0b1, 5.0, (0,)), Job(0b10, 2.0, (2,))]
    assert max(span.end for span in job_spans(jobs)) == 13.0


def test_a_train_step_waits_for_a_call_that_reads_its_own_copy_of_stale_weights():
    """Only without a move: the generation then reads what the training overwrites, so the two take turns."""
    one = (Option(Strategy(), 0, 8, 0, 0),)
    move = PairNode("move", "train", "generate", "both", np.array([[[0]], [[0]], [[0]]]))
    copied = replace(move, microseconds=np.array([[[1]], [[1]], [[0]]]))
    apart = tuple(PlannedCall(name, "actor", name, (replace(one[0], mesh_class=index),))
                  for index, name in enumerate(("generate", "train")))  # fmt: skip
    problem = replace(
        two_calls(),
        iterations=12,
        mesh_classes=((0,), (1,)),
        nodes=(apart[0], copied, apart[1]),
        edges=(
            *(Edge("generate", "train"), Edge("generate", "move"), Edge("move", "generate", 1), Edge("move", "train")),
            *(Edge("train", "move", 1), Edge("generate", "train", -1, without="move")),
        ),
    )
    assert search(problem, 60).seconds == pytest.approx(9e-6)
    in_turn = search(replace(problem, nodes=(apart[0], move, apart[1])), 60)
    assert in_turn.seconds == pytest.approx(16e-6)


def test_a_reload_occupies_the_host_link_alone():
    """It delays what waits for it, not what runs on the same devices meanwhile."""
    problem = two_calls()
    nodes = (problem.nodes[0], LinkNode("reload", "train", (4, 4)), problem.nodes[1])
    beside = replace(problem, nodes=nodes, edges=(*problem.edges, Edge("reload", "train")), iterations=12)
    between = replace(beside, edges=(*beside.edges, Edge("generate", "reload")))
    assert pytest.approx(search(beside, 60).seconds) == 10e-6
    assert pytest.approx(search(between, 60).seconds) == 14e-6


def test_what_fits_nowhere_is_infeasible():
    """An outcome, not an exception: the caller knows which field to blame."""
    result = search(two_calls(memory=50), 60, rule=ReadyFirst)
    assert (SearchOutcome.INFEASIBLE, None, float("inf")) == (result.outcome, result.plan, result.seconds)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_work_gives_the_same_plan(large, method):
    """Neither time nor an earlier search has a say."""
    first, second = (search(large, 600, method, max_evaluations=30_000, rule=ReadyFirst) for _ in range(2))
    assert replace(first, cpu_seconds=0) == replace(second, cpu_seconds=0)


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupt_from_the_keyboard_keeps_the_best_plan_so_far(method):
    """As Ctrl-C does, wherever the loop is. The gap says how good the plan is: the best takes 62.350 s."""
    problem = read_closed_problem(closed_file(safe_ppo(13, 7), num_nodes=4, batch=256)).problem

    def interrupt(progress):
        if progress.seconds is not None:
            raise KeyboardInterrupt

    result = search(problem, 600, method, progress=interrupt, rule=ReadyFirst)
    assert (result.outcome, result.plan is not None) == (SearchOutcome.INTERRUPTED, True)
    assert result.seconds >= 62.349
    assert result.lower_bound_seconds <= 62.351
    assert result.gap > 0


def test_progress_only_gets_better(large):
    """Plans get faster, the bound rises, and the last line is the result."""
    seen = []
    result = search(large, 600, max_evaluations=300_000, progress=seen.append, rule=ReadyFirst)
    spans = [p.seconds for p in seen if p.seconds is not None]
    assert sorted(spans, reverse=True) == spans
    assert sorted(p.lower_bound_seconds for p in seen) == [p.lower_bound_seconds for p in seen]
    assert seen[-1].seconds == result.seconds
    assert f"{result.seconds:.4g} s a step" in str(seen[-1])


def test_it_ends_at_the_gap_that_was_asked_for(large):
    """No work is spent on what does not matter."""
    result = search(large, 600, max_gap=0.5, rule=ReadyFirst)
    assert SearchOutcome.WITHIN_GAP is result.outcome
    assert result.gap <= 0.5


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_must_be_positive(budget):
    with pytest.raises(InvalidInput, match="budget_seconds"):
        search(two_calls(), budget, rule=ReadyFirst)


def test_a_method_that_does_not_exist_is_named():
    with pytest.raises(InvalidInput, match="method: got 'guess', expected exact or metropolis-hastings"):
        search(two_calls(), 1, method="guess", rule=ReadyFirst)


def test_features_that_a_rule_lacks_are_refused_in_a_line():
    """A period needs some iterations. ReaL's rule times neither offloads nor edges that hold without a move alone."""
    problem = two_calls(iterations=3)
    with pytest.raises(InvalidInput, match="iterations: got 3, expected 6 or more"):
        search(problem, 60)
    reload = LinkNode("reload", "train", (4, 4))
    with pytest.raises(InvalidInput, match="nodes: got 'reload', expected no offload and no reload, by ReaL's rule"):
        search(replace(problem, nodes=(*problem.nodes, reload)), 60, rule=ReadyFirst)
    loose = Edge("generate", "train", without="train")
    with pytest.raises(InvalidInput, match="edges: got 'without train', expected edges of every plan, by ReaL's rule"):
        search(replace(problem, edges=(loose,)), 60, rule=ReadyFirst)
