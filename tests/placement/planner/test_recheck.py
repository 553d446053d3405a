"""Constants corrected by the measured nodes of a single plan: right ones stay, wrong ones are found, and change a plan.

The question is PPO of the demo: SmolLM2-135M in bfloat16 on two CPU ranks, 16 rows of 20 and 40 tokens.
"""

import random
from dataclasses import replace
from math import exp

import pytest

from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.hardware.node_hardware import CORE_SECONDS, CPU
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import subject_of
from prefect_rlhf.placement.cost.datasheets.correction import Correction
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import LengthDistribution, Workload
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.fitted_constants import STEPS, Measured, corrected, fit_constants
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.recheck import LEAST_GAIN, recheck, with_largest_caches
from prefect_rlhf.placement.schedule.estimate import without_evaluation
from prefect_rlhf.tasks.rl.settings.online import GRPO
from tests.flows.test_algorithms import traced
from tests.support.strategies import SMOLLM2, TWO_DEVICES, dpo, model, ppo, remax

ROWS, TWENTY = 16, LengthDistribution.fixed(20)
TRUE = Correction(compute=1 / 6.7, link=2.7, eager_launch=3.75)
"""What the constants of a bare CPU were wrong by, on a machine with matrix instructions."""
RECORDED = {
    "actor_generate": 2.37,
    "reward_inference": 0.40,
    "ref_inference": 0.43,
    "critic_inference": 0.39,
    "actor_train_step": 5.48,
    "critic_train_step": 5.00,
}
"""Seconds of the demo's nodes on that machine with two data-parallel ranks for every call, 2026-11-23."""


def asked(graph: DataflowGraph) -> Question:
    models = tuple(model(one.role, one.head, SMOLLM2) for one in graph.models)
    graph = replace(graph, models=models)
    sources = CostSources((replace(CPU, devices_per_node=2),), orchestration_seconds=CORE_SECONDS)
    return Question(graph, Site(TWO_DEVICES, TWO_DEVICES.whole, sources, "cpu"), Workload.fixed(20, 40))


def chosen(question: Question, name: str = "flattening") -> ExecutionPlan:
    return preset(name, question.graph, TWO_DEVICES, TWO_DEVICES.whole, question.workload.longest, "cpu")


def without_vllm(question: Question) -> ExecutionPlan:
    """Every call on both devices, in Megatron: the answer of a search with the constants of a bare CPU."""
    calls = {call.name for call in question.graph if call.kind != "compute"}
    placed = chosen(question).placements
    return question.plan("dp2", {name: replace(place, engine="megatron") for name, place in placed if name in calls})


def seconds_of(question: Question, plan: ExecutionPlan) -> dict[str, float]:
    """What the question's constants say of each node of a step."""
    graph, alone = without_evaluation(question.graph, plan)
    costs = NodeCosts(graph, alone, question.workload, question.site.sources)
    seconds = {subject_of(node.id): costs.cost(node).worked for node in augment(graph, alone, STEPS)}
    return {subject: each for subject, each in seconds.items() if each > 0}


def measured(seconds: dict[str, float], noise: float = 0.0, seed: int = 0) -> dict[str, Measured]:
    """Three steps with these seconds of nodes, and noise of that standard deviation."""
    generator = random.Random(seed)
    return {
        subject: Measured.of([each * exp(generator.gauss(0, noise)) for _ in range(3)])
        for subject, each in seconds.items()
    }


def of_demo(graph: DataflowGraph) -> DataflowGraph:
    """16 rows, and two epochs of two mini-batches."""
    calls = (replace(call, num_rows=ROWS, epochs=2 if call.kind == "train_step" else 1) for call in graph)
    datasets = tuple(replace(data, num_items=ROWS) for data in graph.datasets)
    return replace(graph, calls=tuple(calls), datasets=datasets)


PPO = asked(of_demo(ppo(mini_batches=2)))
DP2 = without_vllm(PPO)


def test_noise_of_a_tenth_names_no_better_plan_in_a_hundred_runs():
    seconds = seconds_of(PPO, DP2)
    for seed in range(100):
        found = recheck(PPO, DP2, measured(seconds, 0.1, seed), 200_000, was_searched=True)
        assert found is not None and found.better is None
        assert found.fitted.correction == Correction()


@pytest.mark.parametrize("seed", range(3))
def test_constants_that_are_wrong_by_up_to_seven_times_are_found_within_a_quarter(seed):
    fitted = fit_constants(PPO, DP2, measured(seconds_of(corrected(PPO, TRUE), DP2), 0.03, seed))
    assert fitted is not None and fitted.explains and not fitted.confirms
    found = fitted.correction
    for name in ("compute", "memory", "link", "eager_launch"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.25)
    assert (found.graph_launch, found.network, found.host) == pytest.approx((1, 1, 1))


def test_recorded_seconds_of_the_slower_plan_prefer_to_train_actor_and_critic_apart():
    """On that machine `split` took 10.0 s, and this plan 14.2 s."""
    fitted = fit_constants(PPO, DP2, {name: Measured(seconds, 0.05) for name, seconds in RECORDED.items()})
    assert fitted is not None and fitted.explains
    now, split = corrected(PPO, fitted.correction), chosen(PPO, "split")
    assert PPO.seconds(DP2) < PPO.seconds(split)
    assert now.seconds(split) < (1 - LEAST_GAIN) * now.seconds(DP2)
    assert now.seconds(DP2) == pytest.approx(14.2, rel=0.15)


def test_a_search_with_corrected_constants_trains_actor_and_critic_apart():
    found = recheck(PPO, DP2, measured(seconds_of(corrected(PPO, TRUE), DP2), 0.05), 50_000, was_searched=True)
    assert found is not None and found.better is not None
    assert found.gain > LEAST_GAIN
    apart = [set(found.better[name].mesh.devices()) for name in ("actor_train_step", "critic_train_step")]
    assert not apart[0] & apart[1]


def test_seconds_that_no_constants_explain_change_no_plan():
    """A node that takes ten times as long as others of its kind."""
    seen = measured(seconds_of(PPO, DP2))
    seen["reward_inference"] = replace(seen["reward_inference"], seconds=10 * seen["reward_inference"].seconds)
    found = recheck(PPO, DP2, seen, 50_000, was_searched=True)
    assert found is not None and found.better is None
    assert not found.fitted.explains


@pytest.mark.parametrize(
    "graph", [ppo(staleness=1), ppo(evaluate_every=2), remax(), dpo()], ids=["staleness", "evaluation", "remax", "dpo"]
)
def test_the_constants_of_every_kind_of_run_can_be_checked(graph):
    question = asked(graph)
    plan = chosen(question)
    right = fit_constants(question, plan, measured(seconds_of(question, plan)))
    wrong = fit_constants(question, plan, measured(seconds_of(corrected(question, TRUE), plan)))
    assert right is not None and right.before == pytest.approx(0, abs=1e-9)
    assert wrong is not None and wrong.explains
    assert wrong.correction.compute == pytest.approx(TRUE.compute, rel=0.5)


def test_calls_on_chosen_rows_do_not_correct_constants():
    """Their number of rows is only expected."""
    question = asked(traced(grpo, algo=GRPO(batch_size=4, samples_per_prompt=4, over_sampling=2)))
    plan = chosen(question)
    seen = measured(seconds_of(question, plan))
    trained = seen["actor_train"]
    fitted = fit_constants(question, plan, seen | {"actor_train": replace(trained, seconds=9 * trained.seconds)})
    assert fitted is not None and fitted.confirms


def test_constants_far_from_the_step_time_are_rejected():
    """The fit leaves out training on chosen rows, but a step has it.

    A run of 7 s a step was told that its plan takes 42.7 s, by links whose fit had only a short move of weights.
    """
    question = asked(traced(grpo, algo=GRPO(batch_size=4, samples_per_prompt=4, over_sampling=2)))
    plan = chosen(question)
    seen = measured(seconds_of(question, plan))
    right = fit_constants(question, plan, seen)
    assert right is not None and right.explains and right.of_step == pytest.approx(1)
    rewarded = fit_constants(question, plan, seen | {"informative": Measured(100.0)})
    assert rewarded is not None and rewarded.of_step == right.of_step
    longer = seen | {"actor_train": replace(seen["actor_train"], seconds=9 * seen["actor_train"].seconds)}
    found = recheck(question, plan, longer, 50_000, was_searched=False)
    assert found is not None and found.better is None
    assert found.fitted.of_step < 0.5 and not found.fitted.explains
    assert not replace(right, of_step=42.7 / 6.9).explains


def test_rows_that_outgrow_their_cache_find_a_plan_with_room_for_the_longest():
    """A cache for the lengths of today would be too small again as rows grow on."""
    graph = traced(grpo, algo=GRPO(batch_size=4, samples_per_prompt=8))
    question = replace(asked(graph), workload=Workload(TWENTY, LengthDistribution.fixed(100).reaching(400)))
    whole = chosen(question)
    generates = [call for call in question.graph if call.kind == "generate"]
    small = with_changes(whole, generates, cache_gib=0.012)
    found = recheck(question, small, measured(seconds_of(question, small)), 50_000, was_searched=False)
    assert found is not None and found.better is not None and found.gain > LEAST_GAIN
    assert [found.better[call.name].cache_gib for call in generates] == [None] * len(generates)
    tight = replace(TWO_DEVICES, device_memory_bytes=fullest(question, whole) - 1)
    asked_there = replace(question, site=replace(question.site, cluster=replace(tight, backend="cpu")))
    larger = with_largest_caches(asked_there, replace(small, cluster=asked_there.site.cluster))
    assert all(0.012 < (larger[call.name].cache_gib or 0) < 0.05 for call in generates)


def fullest(question: Question, plan: ExecutionPlan) -> int:
    """The bytes of a device with which the plan just fits."""
    low, high = 0, TWO_DEVICES.device_memory_bytes
    while high - low > 1:
        middle = (low + high) // 2
        there = replace(question.site.cluster, device_memory_bytes=middle)
        asked_there = replace(question, site=replace(question.site, cluster=there))
        low, high = (low, middle) if asked_there.fits(replace(plan, cluster=there)) else (middle, high)
    return high


def test_without_measurements_constants_are_not_fitted():
    assert fit_constants(PPO, DP2, {}) is None
