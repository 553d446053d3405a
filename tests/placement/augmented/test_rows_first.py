"""`rows_first` of a placement: rows move before other calls of the level begin, and nothing but the order changes."""

import pytest
from hypothesis import given, settings

from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import check_plan
from prefect_rlhf.placement.schedule.schedule import schedule
from tests.support.cases import examples
from tests.support.strategies import (
    GIB,
    ROLLOUT,
    SCORES,
    TWO_DEVICES,
    call,
    dependency_graph,
    model,
    placed,
    plans,
    ppo,
)

pytestmark = pytest.mark.quick

FOUR = ClusterShape("four", 1, 4, 8 * GIB)
SECONDS = {"actor_generate": 8.0, "reward_inference": 1.0, "ref_inference": 2.0, "actor_train_step": 4.0}
MOVE = 0.01  # seconds of any other node


def grpo() -> DataflowGraph:
    """Advantages are made of scores alone, so their rows need not wait for the reference model."""
    rows = {"actor_generate": ROLLOUT[:2]}
    trains_on = rows | {"ref_inference": ("logprobs",), "advantages": ("advantages",)}
    calls = (
        call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT),
        call("reward_inference", "inference", "reward", rows, ("scores",)),
        call("ref_inference", "inference", "ref", rows, ("logprobs",)),
        call("advantages", "compute", None, rows | SCORES, ("advantages",)),
        call("actor_train_step", "train_step", "actor", trains_on),
    )
    models = (model("actor"), model("ref"), model("reward", "scalar"))
    return DataflowGraph("grpo", models, (Dataset("prompts", ("prompt_tokens",), 8),), calls, staleness=1)


def plan(rows_first: bool) -> ExecutionPlan:
    """Generation on two devices, the reference model and training on the other two, and the reward model on all."""
    drawn = preset("flattening", grpo(), FOUR, FOUR.whole)
    for name in SECONDS:
        mesh = {"actor_generate": "n0:2-3", "reward_inference": "n0:0-3"}.get(name, "n0:0-1")
        drawn = placed(drawn, name, mesh=mesh, dp=4 if mesh == "n0:0-3" else 2)
    return check_plan(placed(drawn, "reward_inference", rows_first=rows_first), grpo(), FOUR.whole)


@pytest.mark.parametrize(
    ("rows_first", "period"),
    [
        (False, 8.0 + 1.0 + 2.0),  # generation waits for the reference model on other devices
        (True, 8.0 + 1.0),  # the reference model and training run beside generation
    ],
)
def test_the_next_generation_does_not_wait_for_an_inference_on_other_devices(rows_first, period):
    """Scores of all devices wait for two of them. Behind the reference model they would block the other two."""
    augmented = augment(grpo(), plan(rows_first), 16)
    ids = [node.id for node in augmented.nodes]
    assert (ids.index("transfer.advantages@3") < ids.index("ref_inference@3")) == rows_first
    seconds = {id: SECONDS.get(id.partition("@")[0], MOVE) for id in ids}
    assert schedule(augmented, seconds).seconds_per_step == pytest.approx(period, abs=20 * MOVE)


@given(drawn=plans(ppo(staleness=1), TWO_DEVICES, offload=False))
@settings(max_examples=examples(30))
def test_rows_first_keeps_nodes_and_their_inputs(drawn):
    """Without offloads, which follow the order, rows that move first change no node and no reason to wait."""
    plain = drawn
    for name, _ in drawn.placements:
        plain = placed(plain, name, rows_first=False)
    graph = ppo(staleness=1)
    first, later = (augment(graph, each, 4) for each in (drawn, plain))
    assert {node.id: node.meshes for node in first.nodes} == {node.id: node.meshes for node in later.nodes}
    assert set(dependency_graph(first).edges) == set(dependency_graph(later).edges)
