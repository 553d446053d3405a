"""What the exact search proves holds against every plan of hundreds of random problems."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from random import Random

import numpy as np
import pytest

from benchmarks.planner.closed_problem import read_closed_problem
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.search.driver import prove, search
from prefect_rlhf.placement.search.exact.binding import binding_term
from prefect_rlhf.placement.search.partial.complete import INFINITE, OVERFLOW_FACTOR, CompletePlan, evaluate, fits
from prefect_rlhf.placement.search.partial.incumbent import Incumbent, SearchOutcome
from prefect_rlhf.placement.search.partial.partial import Partial, bound_partial, empty_partial, relate
from prefect_rlhf.placement.search.problem import (
    Choice,
    ComputeNode,
    Edge,
    Interval,
    LinkNode,
    Option,
    PairNode,
    PlannedCall,
    Problem,
)
from prefect_rlhf.placement.search.rules.ready_first import ReadyFirst
from prefect_rlhf.placement.search.rules.run_order import RunOrder
from prefect_rlhf.placement.search.tables.rule import Rule
from prefect_rlhf.placement.search.tables.tables import Tables, build_tables
from tests.placement.search import plain
from tests.placement.search.clusters import closed_file, ppo
from tests.placement.search.random_problems import random_problem
from tests.support.cases import first

SEEDS = range(300)
BLOCK = 20


def blocks():
    return [range(start, start + BLOCK) for start in range(0, len(SEEDS), BLOCK)]


def by_both_rules(seeds: Sequence[int]) -> list[tuple[int, Problem, type[Rule]]]:
    return [(seed, random_problem(seed, rule), rule) for seed in seeds for rule in (ReadyFirst, RunOrder)]


def own_bound(problem: Problem, tables: Tables, plan: dict[str, Choice]) -> int:
    complete = as_incumbent(problem, plan).complete_plan(tables)
    return int(bound_partial(tables, as_partial(tables, complete, range(tables.num_calls), 1.0, Random(0)), INFINITE))


def time_of(tables: Tables, plan: CompletePlan) -> int:
    """The time of a plan in microseconds, whether or not it fits."""
    us = int(evaluate(tables, plan))
    return us if fits(tables, plan) else us // OVERFLOW_FACTOR


def time_of_any(problem: Problem, tables: Tables, plan: dict[str, Choice]) -> int:
    """The time of a plan as the compiled code says, which is held to plain Python's below."""
    return int(time_of(tables, as_incumbent(problem, plan).complete_plan(tables)))


def sample_of_plans(problem: Problem, seed: int, count: int = 40) -> list[dict[str, Choice]]:
    plans = list(plain.every_plan(problem))
    return Random(seed).sample(plans, min(count, len(plans)))


def first_choice(problem: Problem, call: PlannedCall, place: str) -> Choice:
    """The call's first option for a mesh, given as start+size."""
    mesh = next(i for i, mesh in enumerate(problem.meshes) if f"{mesh.start}+{mesh.num_devices}" == place)
    return Choice(next(i for i, o in enumerate(call.options) if mesh in problem.mesh_classes[o.mesh_class]), mesh)


def random_choice(problem: Problem, call: PlannedCall, random: Random) -> Choice:
    option = random.randrange(len(call.options))
    return Choice(option, random.choice(problem.mesh_classes[call.options[option].mesh_class]))


def as_partial(tables: Tables, complete: CompletePlan, decided: Sequence[int], share: float, random: Random) -> Partial:
    """What the decided calls have in a plan, with this share of the relations between them."""
    partial = empty_partial(tables)
    partial.option[list(decided)] = complete.option[list(decided)]
    for a, b in combinations(decided, 2):
        if random.random() < share:
            relate(partial, a, b, int(complete.relation[a, b]))
    return partial


def as_incumbent(problem: Problem, plan: dict[str, Choice]) -> Incumbent:
    chosen = [plan[call.name] for call in problem.calls]
    return Incumbent(0, tuple(choice.option for choice in chosen), tuple(choice.mesh for choice in chosen))


@pytest.mark.parametrize("seeds", first(1, blocks()), ids=str)
def test_the_exact_search_finds_the_best_of_all_plans(seeds):
    """By either rule its plan is the optimum, and where no plan fits it says so. By ReaL's its bound is the optimum.

    By a run's the bound holds in any order, so it may be lower: no lower than the least of the plans' own.
    """
    for _, problem, rule in by_both_rules(seeds):
        tables = build_tables(problem, rule)
        fitting = [plan for plan in plain.every_plan(problem) if plain.fits(problem, plan)]
        result = search(problem, budget_seconds=60, rule=rule)
        if not fitting:
            assert (result.outcome, result.plan) == (SearchOutcome.INFEASIBLE, None), problem.name
            continue
        best = min(time_of_any(problem, tables, plan) for plan in fitting)
        assert SearchOutcome.OPTIMAL is result.outcome, problem.name
        assert plain.legal(problem, result.plan) and plain.fits(problem, result.plan), problem.name
        assert [best] * 2 == [time_of_any(problem, tables, result.plan), round(result.seconds * 1e6)], problem.name
        least = best if rule is ReadyFirst else min(own_bound(problem, tables, plan) for plan in fitting)
        assert least <= round(result.lower_bound_seconds * 1e6) <= best, problem.name


@pytest.mark.parametrize("seeds", first(1, blocks()), ids=str)
def test_a_proof_ends_at_the_least_bound_of_all_plans_that_fit(seeds):
    """No plan is below it, and no further evaluation would raise it; a known plan limits it. It may go on later."""
    below = 0
    for seed in seeds:
        problem = random_problem(seed, RunOrder)
        tables = build_tables(problem, RunOrder)
        fitting = [plan for plan in plain.every_plan(problem) if plain.fits(problem, plan)]
        if not fitting:
            continue
        least = min(own_bound(problem, tables, plan) for plan in fitting)
        best = min(time_of_any(problem, tables, plan) for plan in fitting)
        begun = [None, *(prove(problem, math.inf, max_evaluations=count) for count in (1, math.inf))]
        for known, earlier in product((best, least - 1), begun):
            proof = prove(problem, (known + 0.5) * 1e-6, earlier=earlier)
            expected = min(known, least)
            assert [round(proof.lower_bound_seconds * 1e6), round(proof.provable_seconds * 1e6)] == [expected] * 2
        below += least < best
    assert below, "of some problem the best plan is above the bound"


@pytest.mark.parametrize("seeds", first(1, blocks()), ids=str)
def test_no_plan_ends_before_the_bound_of_any_part_of_it(seeds):
    """A bound of some decided calls and relations holds for each plan that agrees with them."""
    for seed, problem, rule in by_both_rules(seeds):
        random, tables = Random(seed), build_tables(problem, rule)
        for plan in sample_of_plans(problem, seed):
            complete = as_incumbent(problem, plan).complete_plan(tables)
            decided = [call for call in range(tables.num_calls) if random.random() < 0.7]
            partial = as_partial(tables, complete, decided, 0.7, random)
            bound = bound_partial(tables, partial, INFINITE)
            assert bound <= time_of_any(problem, tables, plan), (problem.name, plan)


@pytest.mark.parametrize("seeds", first(1, blocks()[:5]), ids=str)
def test_no_order_of_the_nodes_beats_the_bound_of_a_long_run(seeds):
    """Runs placed at random, each after what it waits for and behind what its devices do, of many iterations.

    Each takes the period at least, but those that fill and drain. (By ReaL's rule the bound holds for its order.)
    """
    many = 40
    for seed in seeds:
        lasting, random = random_problem(seed, RunOrder), Random(seed)
        for plan in sample_of_plans(lasting, seed, 5):
            period = own_bound(lasting, build_tables(lasting, RunOrder), plan)
            for _ in range(6):
                found = plain.makespan_in_random_order(lasting, plan, many, random)
                assert (many - 2) * (period - 1) <= found, (lasting.name, plan)


@pytest.mark.parametrize(("num_devices", "lag", "period"), [(3, 2, 15), (3, 1, 30), (3, 3, 10), (1, 2, 30)])
def test_a_loop_of_calls_takes_its_duration_once_in_its_iterations(num_devices, lag, period):
    """Three calls in a loop, each on a device of its own or all on one: a run of weights that are `lag` steps old."""
    option = Option(Strategy(), 0, 10, 0, 0)
    problem = Problem(
        name="loop",
        device_bytes=(1,) * num_devices,
        meshes=tuple(Interval(device, device + 1, str(device)) for device in range(num_devices)),
        mesh_classes=(tuple(range(num_devices)),),
        nodes=tuple(PlannedCall(name, None, "inference", (option,)) for name in "abc"),
        edges=(Edge("a", "b"), Edge("b", "c"), Edge("c", "a", lag)),
        iterations=12,
    )
    plan = {name: Choice(0, number % num_devices) for number, name in enumerate("abc")}
    assert own_bound(problem, build_tables(problem, RunOrder), plan) == period == plain.period(problem, plan)


def test_by_reals_rule_a_move_that_takes_no_time_passes_its_dependencies_on():
    """A critic that trains where and as it scored is ready no later than what follows the actor's training.

    So its training goes before the next generation on its devices, and with that before what scores on other devices:
    the bound of this plan is then its makespan.
    """
    problem = read_closed_problem(closed_file(ppo(7, 13), num_nodes=1, batch=64)).problem
    place = {"actor_gen": "0+8", "critic_inf": "4+4", "critic_train": "4+4"}
    chosen = {call.name: first_choice(problem, call, place.get(call.name, "0+4")) for call in problem.calls}
    critic_inf, critic_train = (
        next(c for c in problem.calls if c.name == f"critic_{kind}") for kind in ("inf", "train")
    )
    strategies = [option.strategy for option in critic_inf.options]
    as_trained = strategies.index(critic_train.options[chosen["critic_train"].option].strategy)
    chosen["critic_inf"] = replace(chosen["critic_inf"], option=as_trained)
    assert own_bound(problem, build_tables(problem, ReadyFirst), chosen) == plain.makespan(problem, chosen)


@pytest.mark.parametrize("seeds", first(1, blocks()), ids=str)
def test_the_compiled_schedule_equals_the_plain_schedule(seeds):
    """Time and memory of any plan, with all that makes nodes wait or vanish: ReaL's algorithm, and the run's locks."""
    below = 0
    for seed, problem, rule in by_both_rules(seeds):
        tables = build_tables(problem, rule)
        for plan in sample_of_plans(problem, seed, 40 if rule is ReadyFirst else 5):
            factor = 1 if plain.fits(problem, plan) else OVERFLOW_FACTOR
            complete = as_incumbent(problem, plan).complete_plan(tables)
            found = plain.makespan(problem, plan) if rule is ReadyFirst else plain.period(problem, plan)
            bound = own_bound(problem, tables, plan)
            below += found < bound
            assert factor * max(found, bound) == evaluate(tables, complete), (problem.name, plan)
    assert below <= 2, "a few iterations are below the period now and then only"


def test_the_random_problems_hold_every_case():
    """Otherwise the tests above would say less than they seem to."""
    problems = [random_problem(seed) for seed in SEEDS]
    lasting = [random_problem(seed, RunOrder) for seed in SEEDS]
    assert {-1, 0, 1} == {edge.lag for problem in lasting for edge in problem.edges if edge.without}
    nodes = [node for problem in problems for node in problem.nodes]
    pairs = [node for node in nodes if isinstance(node, PairNode)]
    assert {"first", "second", "both"} == {node.occupies for node in pairs}
    assert {2, 3} == {node.microseconds.ndim for node in pairs}
    assert any(isinstance(node, LinkNode) for problem in lasting for node in problem.nodes)
    assert any(isinstance(node, ComputeNode) for problem in lasting for node in problem.nodes)
    roles = [
        {(call.role, call.name) for call in p.calls if any(getattr(n, "call", "") == call.name for n in p.nodes)}
        for p in lasting
    ]
    assert any(len({role for role, _ in of_links}) == 2 for of_links in roles), "what comes and goes excludes others"
    assert any(len({role for role, _ in of_links}) < len(of_links) for of_links in roles), "but not of one role"
    crowded = [
        plain.is_crowded(problem, plan, a, b)
        for seed, problem in enumerate(lasting[:60])
        for plan in sample_of_plans(problem, seed, 3)
        for a in problem.calls
        for b in problem.calls
        if a != b and plain.fits(problem, plan)
    ]
    assert any(crowded), "what comes finds no room beside a call"
    late = [
        plain.is_late(problem, plan, call)
        for seed, problem in enumerate(lasting)
        for plan in sample_of_plans(problem, seed, 3)
        for call in problem.calls
        if call.name in plain.visitors(problem, plan) and plain.fits(problem, plan)
    ]
    assert any(late), "what comes has its devices to itself"
    assert {0, 1, 2} == {edge.lag for problem in problems for edge in problem.edges}
    assert any(len(set(problem.device_bytes)) == 2 for problem in problems)
    outcomes = {search(problem, budget_seconds=60, rule=ReadyFirst).outcome for problem in problems[:60]}
    assert {SearchOutcome.OPTIMAL, SearchOutcome.INFEASIBLE} == outcomes


@pytest.mark.parametrize("seed", range(20))
def test_option_kinds_do_not_change_the_bound(seed):
    """Options of a kind move alike, so a table by options, which repeats rows and columns, has the same bounds."""
    problem = random_problem(seed)
    by_kind = replace(problem, nodes=tuple(map(_twice, problem.nodes)))
    by_option = replace(by_kind, nodes=tuple(_without_kinds(node) for node in by_kind.nodes))
    found = [search(each, 60, max_evaluations=400, rule=ReadyFirst) for each in (by_kind, by_option)]
    assert replace(found[0], cpu_seconds=0.0) == replace(found[1], cpu_seconds=0.0)
    random = Random(seed)
    for _ in range(10):
        plan = {call.name: random_choice(by_kind, call, random) for call in by_kind.calls}
        times = [time_of_any(each, build_tables(each, ReadyFirst), plan) for each in (by_kind, by_option)]
        assert times[0] == times[1]


def _twice(node):
    """Each option of a call twice, and a move for both with the kinds of the first."""
    if isinstance(node, PlannedCall):
        return replace(node, options=node.options * 2)
    if isinstance(node, LinkNode):
        return replace(node, microseconds=node.microseconds * 2)
    first, second = node.microseconds.shape[-2:]
    return replace(node, kinds=(np.tile(np.arange(first), 2), np.tile(np.arange(second), 2)))


def _without_kinds(node):
    return replace(node, microseconds=node.by_option, kinds=None) if isinstance(node, PairNode) else node


def test_the_binding_term_names_what_binds():
    """One call after another is a chain; the bound of the best plan is that of its calls."""
    problem = next(p for p in map(random_problem, SEEDS) if len(p.calls) == 3 and p.iterations == 1)
    words = binding_term(problem, build_tables(problem, ReadyFirst), None)
    assert any(kind in words for kind in ("chain", "one after the other", "device load", "area"))
    assert any(call.name in words for call in problem.calls)
