"""One run, whatever the plan: the same tokens, losses, gradient norms and weights, in float32."""

import pytest
from safetensors.torch import load_file

from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.files.tensor_files import stored_tensors
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import subject_of
from prefect_rlhf.placement.augmented.work import HostCopy
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.cost.sources import CostSources
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from tests.support import plan_matrix
from tests.support.nccl_rules import nccl_rules
from tests.support.plan_matrix import ALONE, CASES, ONE, REAL_EXAMPLE, SPLIT_ACTOR, TAKING_TURNS, TWO_RANKS, made_once
from tests.support.runs import (
    first_differences,
    loss_difference,
    num_devices,
    plan_file,
    prepared,
    weight_difference,
    whole,
)
from tests.support.strategies import GIB

TOLERANCE = 1e-5
NEAR_TIE = 1e-4
OTHER_FAMILIES = (("qwen3", 1), ("qwen3", 4), ("qwen2", 2), ("gemma3_text", 1))
IN_EVERY_TEST = ("streamed groups", "streamed")
UNDER_THE_RULES = ("ppo", "pipeline generates")
"""The plans of `make test`. Under the rules of NCCL a plan has to change nothing, too."""
PLANS = [
    pytest.param(case, plan, marks=() if (case, plan) == IN_EVERY_TEST else pytest.mark.all)
    for case in CASES
    for plan in CASES[case].plans
    if plan != "alone"
]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    parameters, run = made_once(CASES, lambda: tmp_path_factory.mktemp("matrix"))
    return lambda case, plan="alone": (parameters(case), run(case, plan))


def assert_equal(alone, result, record_property):
    differences = first_differences(alone, result)
    record_property("token differences", differences)
    assert all(gap < NEAR_TIE for *_, gap in differences), f"no near tie: {differences}"
    assert not differences, f"near ties, to be listed: {differences}"
    assert result.row_ids == alone.row_ids
    assert loss_difference(alone, result) < TOLERANCE
    assert weight_difference(alone, result) < TOLERANCE


@pytest.mark.parametrize(("case", "plan"), PLANS)
def test_a_plan_changes_nothing_but_time(ran, case, plan, record_property):
    """Under tp 4 two ranks have a copy of each key-value head of Qwen 3."""
    assert_equal(ran(case)[1], ran(case, plan)[1], record_property)


@pytest.mark.parametrize(
    ("case", "plan"),
    [
        pytest.param(case, plan, marks=() if (case, plan) == UNDER_THE_RULES else pytest.mark.all)
        for case in CASES
        for plan in CASES[case].plans
        if num_devices(CASES[case].plans[plan]) > 1
    ],
)
def test_a_plan_keeps_the_rules_of_nccl(ran, tmp_path, case, plan, record_property):
    """Gloo would accept calls that hang on GPUs. The gradients go through Megatron's own buffers, as on GPUs."""
    given, alone = ran(case)
    with nccl_rules(tmp_path / "rules") as records:
        result = CASES[case].run(given, plan)
    assert records.broken() == []
    assert "allreduce" in records.checked()
    assert "batch" in records.checked() or (case, plan) != UNDER_THE_RULES  # some plans move no weights between ranks
    assert_equal(alone, result, record_property)


@pytest.mark.all  # test_megatron_ranks.py offloads
def test_the_host_link_carries_the_bytes_of_the_estimate(ran, tmp_path, record_property):
    """Node by node. Frozen weights are dropped and come back; vLLM's copy is dropped and never comes back."""
    given, result = ran("ppo", "taking turns")
    assert_equal(ran("ppo")[1], result, record_property)
    chosen = given | {"plan": str(plan_file(TAKING_TURNS, tmp_path / "turns.json"))}
    augmented = prepared(ppo, chosen, whole(ClusterShape("one", 1, 1, 8 * GIB, backend="cpu"))).augmented
    costs = NodeCosts(augmented.graph, augmented.plan, Workload.fixed(8, 8), CostSources(()))
    every = augment(augmented.graph, augmented.plan, plan_matrix.STEPS)
    copies = [node for node in every if isinstance(node.work, HostCopy) and node.step > 1]  # from step 2, with moments
    expected = {node.id: costs.host_bytes(node.work) for node in copies}
    moved = {span["node"]: span["bytes_moved"] for span in result.spans if span["node"] in expected}
    assert moved == pytest.approx(expected, rel=0.02, abs=1 << 14)
    of_step = {subject_of(node): size for node, size in moved.items() if node.endswith("@2")}
    assert of_step["reload.ref.megatron"] > 100 * max(1, of_step["offload.ref.megatron"])
    assert of_step["reload.actor.vllm"] + of_step["offload.actor.vllm"] < of_step["reload.ref.megatron"] / 100


def test_training_moves_the_weights_by_far_more_than_the_tolerance(ran):
    """Else equal weights would say nothing."""
    given, result = ran("ppo")
    for role in ("actor", "critic"):
        before, after = load_file(f"{given[role]['path']}/model.safetensors"), result.weights[role]
        moved = max(float((values - before[name]).abs().max()) for name, values in after.items() if name in before)
        assert moved > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("case", "select"),
    [
        ("streamed groups", "informative"),
        pytest.param("grpo", "informative", marks=pytest.mark.all),
        pytest.param("best", "best", marks=pytest.mark.all),
        pytest.param("pairs", "best_and_worst", marks=pytest.mark.all),
    ],
)
def test_a_case_that_selects_keeps_some_rows_and_not_all(ran, case, select):
    assert any(0 < step[f"{select}.kept_share"] < 1 for step in ran(case)[1].metrics)


def test_groups_and_evaluation_run_in_the_parts_of_the_plan(ran):
    subjects = {subject_of(span["node"]) for span in ran("streamed groups", "streamed")[1].spans}
    cut = {"actor_generate.3of3", "reward_inference.6of6", "actor_evaluation.8of8", "reward_evaluation.4of4"}
    assert cut | {"ref_inference", "actor_train"} <= subjects


@pytest.mark.all  # test_megatron_ranks.py trains on two row sets
def test_two_row_sets_are_learnt_by_one_loss(ran):
    """The likelihood of the other rows rises, so their gradient is in the step."""
    steps = ran("two row sets")[1].metrics
    for step in steps:
        total = step["actor_train.policy_gradient.loss"] + 0.5 * step["actor_train.nll.loss"]
        assert step["actor_train.loss"] == pytest.approx(total, abs=TOLERANCE)
    assert steps[-1]["actor_train.nll.loss"] < steps[0]["actor_train.nll.loss"] - 0.1


@pytest.mark.all  # tests/engines/megatron/test_two_heads.py
def test_a_shared_trunk_has_both_heads_and_can_be_trained_on(ran):
    result = ran("shared trunk")[1]
    assert "score.weight" in stored_tensors(result.run_dir / "actor", "actor.path")
    assert float(result.weights["actor"]["score.weight"].abs().max()) > 1e-3, "it began with zeros"
    assert read_model_spec("actor", result.run_dir / "actor", "lm+scalar").head == "lm+scalar"
    assert read_model_spec("ref", result.run_dir / "actor", "lm").head == "lm"


@pytest.mark.all  # tests/engines/megatron/test_two_heads.py trains both heads under several layouts
@pytest.mark.parametrize("plan", [plan for plan in CASES["shared trunk"].plans if plan != "alone"])
def test_a_shared_trunk_resumes_to_the_same_bits(ran, plan):
    given, whole = ran("shared trunk", plan)
    changes = {"resume_from": str(whole.run_dir / "checkpoints" / "step-000001")}
    again = CASES["shared trunk"].run(given | changes, plan)
    assert again.tokens == whole.tokens
    assert all(bool((values == again.weights["actor"][key]).all()) for key, values in whole.weights["actor"].items())


@pytest.mark.all  # tests/engines/megatron/test_megatron_ranks.py deals rows unevenly
@pytest.mark.parametrize(("rows", "mini_batches"), [(7, 2), (1, 1)])
def test_rows_need_not_divide_by_replicas(tmp_path, rows, mini_batches, record_property):
    """Mini-batches of three and four rows over two replicas; and one row, of which a replica has none."""
    parameters = plan_matrix.parameters(tmp_path) | {"steps": 1}
    update = parameters["algo"]["update"] | {"mini_batches": mini_batches}
    algo = parameters["algo"] | {"batch_size": rows, "update": update}
    alone, shared = (
        plan_matrix.run(parameters | {"algo": algo}, where, f"{rows} on {count}", count)
        for where, count in ((ALONE, 1), (TWO_RANKS, 2))
    )
    assert len(alone.tokens[0]) == rows
    assert_equal(alone, shared, record_property)


@pytest.mark.all
@pytest.mark.parametrize(("family", "kv_heads"), OTHER_FAMILIES)
def test_nor_for_an_actor_of_another_family(tmp_path, family, kv_heads, record_property):
    """With one key-value head, of which both ranks of tp 2 have a copy, through vLLM, reallocation and training."""
    given = plan_matrix.parameters(tmp_path, family, kv_heads) | {"steps": 1}
    runs = (
        plan_matrix.run(given, where, f"{family} on {count}", count) for where, count in ((ONE, 1), (SPLIT_ACTOR, 2))
    )
    assert_equal(*runs, record_property)


@pytest.mark.all
def test_reals_example_on_eight_ranks_changes_nothing_either(ran, record_property):
    """And overlaps what ReaL's notes say: inference calls beside each other, then both trainings."""
    given, expected = ran("ppo")
    result = plan_matrix.run(given, REAL_EXAMPLE, "real_example", num_devices=8)
    assert_equal(expected, result, record_property)
    planned = {span["node"]: (span["start"], span["end"]) for span in result.spans}
    for step in range(1, plan_matrix.STEPS + 1):
        beside = [planned[f"{call}@{step}"] for call in ("reward_inference", "ref_inference", "critic_inference")]
        assert max(start for start, _ in beside) < min(end for _, end in beside)
        (a, b), (c, d) = planned[f"actor_train@{step}"], planned[f"critic_train@{step}"]
        assert max(a, c) < min(b, d)
