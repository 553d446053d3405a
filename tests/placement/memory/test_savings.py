"""Savings: a plan that does not fit gets the fewest that suffice, and never another value of a stated word."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.fit import longest_rows
from prefect_rlhf.placement.memory.savings import CACHE_STEP, LARGE_TOKENS, Savings, with_changes
from prefect_rlhf.placement.plan import ExecutionPlan, Placement, instances
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import check_plan
from tests.support.strategies import GIB, dpo, on, ppo, remax

LONGEST = 200  # tokens of a row: activations are most of the memory
ROWS = {"ppo": 24, "dpo": 12, "remax": 20}
GRAPHS = {graph.name: graph for graph in (ppo(), dpo(), remax())}
SIZES = (9, 12, 16, 20, 28, 40, 60, 90, 140, 220)  # MiB of a device


def problem(name: str) -> tuple[DataflowGraph, ExecutionPlan]:
    """The graph with more rows, and the plan without savings of one device."""
    graph = GRAPHS[name]
    graph = replace(graph, calls=tuple(replace(call, num_rows=ROWS[name]) for call in graph))
    large = ClusterShape("one", 1, 1, 64 * GIB)
    return graph, preset("flattening", graph, large, large.whole, LONGEST, "cpu")


@cache
def completed() -> list[tuple[DataflowGraph, ExecutionPlan, ExecutionPlan]]:
    """Each problem on each size of device: graph, plan without savings, and the plan with the fewest that fit."""
    answers = []
    for name, mebibytes in product(GRAPHS, SIZES):
        graph, plan = problem(name)
        before = replace(plan, cluster=ClusterShape("small", 1, 1, mebibytes << 20))
        found = Savings(graph, longest_rows(graph, LONGEST), "cpu").least(before)
        if found is not None:
            answers.append((graph, before, found))
    return answers


def fits(graph: DataflowGraph, plan: ExecutionPlan) -> bool:
    return certify_plan(plan, graph, longest_rows(graph, LONGEST), "cpu").fits


def words(placed: Placement) -> tuple[object, ...]:
    """The words of a placement that a saving may change, apart from micro-batches."""
    return placed.sequence_parallel, placed.recompute, placed.cache_gib, placed.offload, placed.prefetch


def test_the_problems_cover_each_kind_of_saving():
    placed = [placement for _, _, found in completed() for _, placement in found.placements]
    assert any(each.micro_batches > 1 for each in placed)
    assert any(each.recompute for each in placed)
    assert any(each.offload != "none" for each in placed)
    assert any(found == before for _, before, found in completed())


def test_every_answer_is_legal_and_fits_by_its_certificate():
    for graph, _, found in completed():
        assert fits(graph, check_plan(found, graph, found.cluster.whole))


def test_plans_that_share_their_nodes_are_certified_as_they_are():
    for graph, before, found in completed():
        workload = longest_rows(graph, LONGEST)
        savings = Savings(graph, workload, "cpu")
        for plan in (*savings.all_of(before), found):
            assert savings.certificate(plan) == certify_plan(plan, graph, workload, "cpu")


@pytest.mark.all
def test_no_smaller_numbers_of_micro_batches_fit():
    """By trying all of them: every vector of divisors that is nowhere larger, and somewhere smaller."""
    for graph, _, found in completed():
        calls = [call for call in graph if found[call.name].micro_batches > 1]
        chosen = [found[call.name].micro_batches for call in calls]
        for numbers in product(*(range(1, number + 1) for number in chosen)):
            divides = all(ROWS[graph.name] % number == 0 for number in numbers)
            if not divides or list(numbers) == chosen:
                continue
            fewer = found
            for call, number in zip(calls, numbers, strict=True):
                fewer = with_changes(fewer, [call], micro_batches=number)
            assert not fits(graph, fewer), (graph.name, found.cluster, numbers, chosen)


def test_other_savings_come_only_where_micro_batches_are_not_enough():
    for graph, before, found in completed():
        cut = before
        for call in graph:
            if before[call.name].engine == "megatron":
                items = call.most_items(1)
                cut = with_changes(cut, [call], micro_batches=items)
        only_cut = all(words(found[call.name]) == words(before[call.name]) for call in graph)
        assert only_cut == fits(graph, cut), (graph.name, found.cluster)


def test_a_cache_is_as_large_as_other_savings_allow():
    """A small cache loses most seconds: with the next size, even copies that return to host memory do not make room."""
    small = 0
    for graph, before, found in completed():
        for calls in instances(graph, found).values():
            if (size := found[calls[0].name].cache_gib) is None or before[calls[0].name].cache_gib is not None:
                continue
            larger = with_changes(found, calls, cache_gib=size * CACHE_STEP * 1.01)
            for copy, others in instances(graph, found).items():
                if all(call.kind != "train_step" for call in others) and graph.trained_by(copy.role) is None:
                    larger = with_changes(larger, others, offload="all")
            small += 1
            assert not fits(graph, larger)
    assert small


def test_no_single_saving_can_be_taken_back():
    """Neither a call's recomputation, by one layer, nor a copy's offload."""
    for graph, _, found in completed():
        for call in graph:
            if layers := found[call.name].recompute:
                fewer = {"all": 3}.get(layers, layers) - (layers != "all")
                assert not fits(graph, with_changes(found, [call], recompute=fewer))
        for calls in instances(graph, found).values():
            if found[calls[0].name].offload != "none":
                assert not fits(graph, with_changes(found, calls, offload="none", prefetch=True))


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize(
    ("word", "value"), [("micro_batches", 2), ("recompute", 1), ("offload", "optimizer"), ("offload", "none")]
)
def test_a_stated_word_stays(name, word, value):
    graph, plan = problem(name)
    train = next(call for call in graph if call.kind == "train_step")
    (copy,) = (calls for calls in instances(graph, plan).values() if train in calls)
    stated = with_changes(plan, copy if word == "offload" else [train], **{word: value})
    kept = 0
    for mebibytes in SIZES:
        small = replace(stated, cluster=ClusterShape("small", 1, 1, mebibytes << 20))
        savings = Savings(graph, longest_rows(graph, LONGEST), "cpu", frozenset({(train.name, word)}))
        found = savings.least(small)
        if found is not None:
            kept += 1
            assert getattr(found[train.name], word) == value
    assert kept


def test_sequence_parallelism_saves_before_recomputation():
    """With tp 2, on a device where micro-batches alone are not enough."""
    graph = GRAPHS["dpo"]
    graph = replace(graph, calls=tuple(replace(call, num_rows=2) for call in graph))
    placements = tuple((call.name, on("n0:0-1", "megatron", tp=2)) for call in graph)
    seen = set()
    for kibibytes in range(6_000, 20_000, 250):
        plan = ExecutionPlan("mine", ClusterShape("small", 1, 2, kibibytes << 10), placements)
        found = Savings(graph, longest_rows(graph, LONGEST), "cpu").least(plan)
        if found is not None:
            train = next(found[call.name] for call in graph if call.kind == "train_step")
            seen.add((train.sequence_parallel, bool(train.recompute)))
    assert {(False, False), (True, False)} <= seen


def test_on_a_gpu_small_micro_batches_come_after_copies_that_leave_and_recomputation():
    """A device waits for launches of kernels in a micro-batch of few tokens; on CPU nothing is launched."""
    graph, plan = problem("dpo")
    work = longest_rows(graph, LONGEST)
    large = LARGE_TOKENS["cuda"]
    savings = Savings(graph, work, "cuda")
    fast, slow = savings.all_of(plan, may_be_slow=False), savings.all_of(plan)
    assert slow[: len(fast)] == fast
    train = next(call for call in graph if call.kind == "train_step")
    assert ROWS["dpo"] * LONGEST < 2 * large, "all rows are a single large micro-batch"
    assert fast[-1][train.name].micro_batches == 1 and fast[-1][train.name].recompute == "all"
    assert slow[-1][train.name].micro_batches == train.most_items(1)
    on_cpu = Savings(graph, work, "cpu").all_of(plan)[1]
    assert on_cpu[train.name].micro_batches == train.most_items(1)
