"""Copies for a second reader of trained weights: the bound counts its certain move, and no plan takes less."""

from dataclasses import replace
from itertools import product

from prefect_rlhf.placement.cost.datasheets.hardware import Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.question import Question, Site
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.planner.space.restrictions import pinned
from prefect_rlhf.placement.search.driver import search
from tests.support.strategies import GIB, ROLLOUT, call, generated, model

ROWS = 16
FIRST, SECOND, TRAIN = "actor_generate", "actor_generate_baseline", "actor_train_step"


def question() -> Question:
    """Two generations and a train_step of 7B on two L40S, between which weights move slowly; with room for all."""
    prompts = {"prompts": ("prompt_tokens",)}
    compared = {FIRST: ROLLOUT[:2], SECOND: ROLLOUT[:2]}
    calls = (
        call(FIRST, "generate", "actor", prompts, ROLLOUT, num_rows=ROWS),
        call(SECOND, "generate", "actor", prompts, ROLLOUT, num_rows=ROWS, rows=generated(SECOND)),
        call("advantages", "compute", None, compared, ("advantages",), num_rows=ROWS),
        call(TRAIN, "train_step", "actor", {FIRST: ROLLOUT, "advantages": ("advantages",)}, num_rows=ROWS),
    )
    graph = DataflowGraph(
        "two readers",
        (model("actor", shape=known_shape("llama-7b")),),
        (Dataset("prompts", ("prompt_tokens",), ROWS),),
        calls,
    )
    cluster = ClusterShape("two", 1, 2, 400 * GIB)
    sources = CostSources((Hardware(DATASHEETS["l40s"], 2),))
    return Question(graph, Site(cluster, cluster.whole, sources), Workload.fixed(128, 32))


def every_plan(asked: Question, space: PlanSpace) -> list[ExecutionPlan]:
    """All placements that stay in memory, each with its fastest number of micro-batches."""
    ways = []
    for name in (FIRST, SECOND, TRAIN):
        best = {}
        for option in sorted(space.candidates[name], key=lambda option: -option.seconds):
            if option.placement.offload == "none":
                for mesh in space.context.space.classes[option.mesh_class]:
                    placed = replace(option.placement, mesh=space.context.space.meshes[mesh])
                    best[placed.mesh, placed.strategy, placed.engine] = placed
        ways.append(list(best.values()))
    plans = (dict(zip((FIRST, SECOND, TRAIN), chosen, strict=True)) for chosen in product(*ways))
    return [asked.plan("stated", placements) for placements in plans]


def bounds(space: PlanSpace) -> tuple[float, float]:
    """Seconds that no plan takes less than: without a choice of copies, and with it."""
    problems = (space.least.problem, space.with_copies.problem)
    plain, chosen = (search(problem, max_evaluations=200_000).lower_bound_seconds for problem in problems)
    return plain, chosen


def test_no_plan_takes_less_than_the_bound_with_copies():
    """Of all plans on all meshes; some share a copy, and some have two."""
    asked = question()
    space = PlanSpace.of(asked)
    plans = [plan for plan in every_plan(asked, space) if asked.fits(plan)]
    shares = [plan[FIRST] == plan[SECOND] for plan in plans]
    assert any(shares) and not all(shares)
    assert max(bounds(space)) <= min(map(asked.seconds, plans)) * (1 + 1e-9)


def test_a_second_reader_on_other_devices_certainly_has_a_move():
    """The bound counts it, and still no plan with these meshes takes less."""
    asked = question()
    pins = {FIRST: DeviceMesh(0, 1, 0, 1), SECOND: DeviceMesh(0, 1, 1, 1)}
    space = pinned(PlanSpace.of(asked), pins)
    plain, chosen = bounds(space)
    fastest = min(asked.seconds(plan) for plan in every_plan(asked, space) if asked.fits(plan))
    assert plain * 1.02 < chosen <= fastest * (1 + 1e-9)
