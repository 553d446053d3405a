"""The bound on plans with streamed parts: of a small question every plan is timed, and the bound is below each."""

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest

from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.memory.savings import with_changes
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.plan import Placement
from prefect_rlhf.placement.planner import attempts
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.neighbours import changed_plan
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.candidates import legal_candidates, uncut
from prefect_rlhf.placement.planner.space.plan_problem import MICROSECONDS, PlanSpace
from prefect_rlhf.placement.planner.space.streamed_problem import seconds_in_parts, streamed_problems
from prefect_rlhf.placement.plans.streaming import streamable_pairs
from prefect_rlhf.placement.search.budget import Budget
from prefect_rlhf.placement.search.driver import prove, search
from prefect_rlhf.placement.search.problem import Problem
from tests.placement.planner.test_planner import GRAPHS
from tests.placement.planner.test_planner import question as question_of
from tests.support.strategies import GIB, ROLLOUT, call, dpo, grouped, model, on, ppo, remax

ROWS = 2048
SHAPE = replace(
    known_shape("llama-7b"),
    hidden_size=2048,
    intermediate_size=5632,
    num_layers=24,
    num_attention_heads=16,
    num_kv_heads=16,
)
PINS = {"actor_generate": "n0:0", "reward_inference": "n0:1", "actor_train_step": "n0:0-1"}
TRAINED = replace(on("n0:0-1", "megatron", dp=2), micro_batches=128)
KEYS = ("tokens", "prompt_length")


def question(rows: int = ROWS, gib: int = 400) -> Question:
    """A generation, the inference of a reward model, and a train_step, on two H100s."""
    generated = {"actor_generate": KEYS}
    calls = (
        call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT, num_rows=rows),
        call("reward_inference", "inference", "reward", generated, ("scores",), num_rows=rows),
        call(
            "actor_train_step",
            "train_step",
            "actor",
            {"actor_generate": ROLLOUT, "reward_inference": ("scores",)},
            num_rows=rows,
        ),
    )
    models = (model("actor", shape=SHAPE), model("reward", "scalar", SHAPE))
    graph = DataflowGraph("small", models, (Dataset("prompts", ("prompt_tokens",), rows),), calls)
    sources = CostSources((Hardware(DATASHEETS["h100"], 2),))
    cluster = ClusterShape("two", 1, 2, gib * GIB)  # by default room for all, so that memory decides nothing
    return Question(graph, Site(cluster, cluster.whole, sources), Workload.fixed(512, 64))


def planned(asked: Question):
    return plan_graph(asked, evaluations=100_000, pins={name: DeviceMesh.parse(mesh) for name, mesh in PINS.items()})


def microseconds(problem: Problem, call: str) -> list[int]:
    """Of each option of a call."""
    return next([option.microseconds for option in node.options] for node in problem.nodes if node.name == call)


def plans_with_parts(asked: Question, trained: Placement):
    """Several numbers of parts and of micro-batches, on the devices of the pins."""
    for generate, infer, cuts in product((1, 2, 4, 64), (1, 2, 4, 8), (2, 16)):
        placements = {
            "actor_generate": replace(on("n0:0", "vllm"), parts=generate),
            "reward_inference": replace(on("n0:1", "megatron"), parts=infer, micro_batches=cuts),
            "actor_train_step": replace(trained, micro_batches=128),  # a number that the bound is for
        }
        yield asked.plan("tried", placements)


def test_no_plan_with_parts_is_below_the_bound_and_some_are_below_the_bound_without_parts():
    """The bound that ignores parts would be wrong."""
    asked = question()
    found = planned(asked)
    tried = plans_with_parts(asked, found.plan["actor_train_step"])
    timed = [(asked.seconds(plan), plan) for plan in tried]
    whole = min(
        seconds for seconds, plan in timed if plan["actor_generate"].parts == plan["reward_inference"].parts == 1
    )
    least = min(seconds for seconds, _ in timed)
    without_parts = search(found.space.computed.problem, max_evaluations=50_000).lower_bound_seconds
    assert found.lower_bound_seconds <= least < without_parts <= whole
    assert found.lower_bound_seconds <= found.provable_seconds <= found.seconds
    assert found.binding.endswith(", in plans with streamed parts")
    assert sum(found.gap_parts.values()) == pytest.approx(found.gap)


def test_an_option_stands_for_the_parts_of_every_option_that_it_dominates():
    """A number of micro-batches that is slower for the whole call may be the fastest in parts."""
    asked = question(rows=256)
    site = replace(asked.site, cluster=ClusterShape("four", 1, 4, 400 * GIB), mesh=DeviceMesh.parse("n0:0-3"))
    space = PlanSpace.of(replace(asked, site=site, workload=Workload.fixed(2048, 8)))
    (streamed,) = streamed_problems(space)
    name, graph_call = "actor_generate", asked.graph.call("actor_generate")
    kept = space.candidates[name]
    whole, cut = (
        next(node for node in problem.nodes if node.name == name) for problem in (space.computed.problem, streamed)
    )
    bounds = defaultdict(list)
    for option, in_parts, candidate in zip(whole.options, cut.options, kept, strict=True):
        more = (in_parts.microseconds - option.microseconds) / MICROSECONDS
        bounds[uncut(candidate.placement)].append(
            seconds_in_parts(graph_call, candidate.placement, 1, space.context) + more
        )
    dropped = [each for each in legal_candidates(graph_call, space.context) if each not in kept]
    assert any(each.placement.strategy.pp > 1 for each in dropped)
    for each in dropped:
        if uncut(each.placement) in bounds:
            seconds = [
                seconds_in_parts(graph_call, each.placement, count, space.context) for count in (2, 4, 8, 16, 32)
            ]
            assert min(bounds[uncut(each.placement)]) <= min(seconds) + 2 / MICROSECONDS


def test_an_option_that_takes_too_long_as_a_whole_keeps_its_seconds():
    space = PlanSpace.of(question())
    (every,) = streamed_problems(space)
    whole, cut = (microseconds(problem, "actor_generate") for problem in (space.computed.problem, every))
    most = sorted(whole)[len(whole) // 2]
    (some,) = streamed_problems(space, most / MICROSECONDS)
    expected = [before if before >= most else after for before, after in zip(whole, cut, strict=True)]
    assert microseconds(some, "actor_generate") == expected != cut


def test_parts_that_gain_two_percent_are_the_answer():
    asked = question(gib=80)
    found = planned(asked)
    parts = {name: placement.parts for name, placement in found.plan.placements}
    assert parts == {"actor_generate": 2, "reward_inference": 2, "actor_train_step": 1}
    assert found.seconds <= 0.98 * asked.seconds(with_changes(found.plan, asked.graph.calls, parts=1))
    assert not found.beats_bound
    assert asked.fits(found.plan)


def test_a_small_gain_does_not_justify_parts():
    """Few rows take nearly as long as many, so each part would repeat the time of the whole."""
    found = planned(question(rows=16))
    assert {placement.parts for _, placement in found.plan.placements} == {1}
    assert "streamed parts" not in found.binding


def test_streamed_bounds_share_the_evaluations_of_a_proof(monkeypatch):
    """Both inferences of PPO and the generation may stream."""
    asked, taken = question_of(GRAPHS["ppo"]), []

    def counted(problem, most_seconds, seconds, evaluations, *others):
        taken.append(evaluations)
        return prove(problem, most_seconds, seconds, evaluations, *others)

    monkeypatch.setattr(attempts, "prove", counted)
    space = PlanSpace.of(asked)
    request = attempts.SearchRequest(asked, space, Budget(1000), "exact", None, PlanSpace.of)
    found = [attempts.Finding(bound=search(space.computed.problem, max_evaluations=1000))]
    assert attempts.prove_bound(request, Budget(10_000), found, 1000.0).lower_bound_seconds <= 1000.0
    whole, *streamed = taken
    assert len(streamed) == len(list(streamed_problems(space))) > 0
    assert sum(streamed) == pytest.approx(whole) == 10_000


def test_a_neighbour_of_a_streamed_plan_streams_if_it_can():
    """Else the gain of the parts would count against each other placement."""
    asked = question()
    placed = {"actor_generate": on("n0:0", "vllm"), "reward_inference": on("n0:1", "megatron")}
    plan = asked.plan("streamed", {**{n: replace(p, parts=4) for n, p in placed.items()}, "actor_train_step": TRAINED})
    cut = replace(placed["reward_inference"], micro_batches=16)
    beside = changed_plan(asked, plan, {"reward_inference": cut})
    assert (beside["actor_generate"].parts, beside["reward_inference"]) == (4, replace(cut, parts=4))
    together = changed_plan(asked, plan, {"reward_inference": on("n0:0", "megatron")})
    assert {placement.parts for _, placement in together.placements} == {1}


def test_a_call_may_stream_to_the_inferences_of_its_rows_alone():
    pairs = {(one.name, other.name) for one, other in streamable_pairs(ppo())}
    inferences = ("ref_inference", "reward_inference", "critic_inference")
    assert pairs == {("actor_generate", name) for name in inferences}
    assert ("actor_generate", "reward_inference") in {(a.name, b.name) for a, b in streamable_pairs(grouped())}
    assert {one.name for one, _ in streamable_pairs(remax())} == {"actor_generate", "actor_generate_baseline"}
    assert not list(streamable_pairs(dpo())), "rows of a dataset are there from the start"


def test_the_streamed_problem_drops_a_wait_and_keeps_what_follows_from_it():
    """The train_step waits for both; two parts of the generation take longer than the whole."""
    asked = question()
    space = PlanSpace.of(asked)
    (streamed,) = streamed_problems(space)
    edges = {(edge.source, edge.target) for edge in streamed.edges if edge.lag == 0 and edge.without is None}
    assert ("actor_generate", "reward_inference") not in edges
    assert {("actor_generate", "actor_train_step"), ("reward_inference", "actor_train_step")} <= edges
    whole, cut = (
        next(node for node in problem.nodes if node.name == "actor_generate")
        for problem in (space.computed.problem, streamed)
    )
    assert all(a.microseconds <= b.microseconds for a, b in zip(whole.options, cut.options, strict=True))
    fastest = min(range(len(whole.options)), key=lambda number: whole.options[number].microseconds)
    assert whole.options[fastest].microseconds < cut.options[fastest].microseconds
