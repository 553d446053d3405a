"""One run, whatever the plan: the same tokens, losses, gradient norms and weights, in float32."""

import pytest

from tests import plan_matrix
from tests.plan_matrix import ALONE, FOUR_RANKS, ONE, REAL_EXAMPLE, SPLIT_ACTOR, TWO_RANKS

TOLERANCE = 1e-5
NEAR_TIE = 1e-4
OTHER_FAMILIES = (("qwen3", 1), ("qwen3", 4), ("qwen2", 2), ("gemma3_text", 1))
IN_EVERY_TEST = ("offload", "pipeline generates")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]


@pytest.fixture(scope="module")
def parameters(tmp_path_factory):
    return plan_matrix.parameters(tmp_path_factory.mktemp("matrix"))


@pytest.fixture(scope="module")
def alone(parameters):
    """The run on one device."""
    return plan_matrix.run(parameters, ONE, "one", num_devices=1)


def assert_equal(alone, result, record_property):
    differences = plan_matrix.first_differences(alone, result)
    record_property("token differences", differences)
    assert all(gap < NEAR_TIE for *_, gap in differences), f"no near tie: {differences}"
    assert not differences, f"near ties, to be listed: {differences}"
    assert plan_matrix.loss_difference(alone, result) < TOLERANCE
    assert plan_matrix.weight_difference(alone, result) < TOLERANCE


def test_training_moves_the_weights_by_far_more_than_the_tolerance(parameters, alone):
    """Else equal weights would say nothing."""
    from safetensors.torch import load_file

    for role in ("actor", "critic"):
        before = load_file(f"{parameters[role]['path']}/model.safetensors")
        moved = max(
            float((values - before[name]).abs().max()) for name, values in alone.weights[role].items() if name in before
        )
        assert moved > 100 * TOLERANCE


@pytest.mark.parametrize("name", IN_EVERY_TEST)
def test_a_plan_changes_nothing_but_time(parameters, alone, name, record_property):
    assert_equal(alone, plan_matrix.run(parameters, FOUR_RANKS[name], name), record_property)


@pytest.mark.all  # tests/engines/megatron/test_megatron_ranks.py deals rows unevenly
@pytest.mark.parametrize(("rows", "mini_batches"), [(7, 2), (1, 1)])
def test_rows_need_not_divide_by_replicas(parameters, rows, mini_batches, record_property):
    """Mini-batches of three and four rows over two replicas; and one row, of which a replica has none."""
    update = parameters["algo"]["update"] | {"mini_batches": mini_batches}
    algo = parameters["algo"] | {"batch_size": rows, "update": update}
    alone, shared = (
        plan_matrix.run(parameters, where, f"{rows} on {count}", num_devices=count, steps=1, algo=algo)
        for where, count in ((ALONE, 1), (TWO_RANKS, 2))
    )
    assert len(alone.tokens[0]) == rows
    assert_equal(alone, shared, record_property)


@pytest.mark.all
@pytest.mark.parametrize(("family", "kv_heads"), OTHER_FAMILIES)
def test_nor_for_an_actor_of_another_family(tmp_path, family, kv_heads, record_property):
    """With one key-value head, of which both ranks of tp 2 have a copy, through vLLM, reallocation and training."""
    given = plan_matrix.parameters(tmp_path, family, kv_heads)
    runs = (
        plan_matrix.run(given, where, f"{family} on {count}", num_devices=count, steps=1)
        for where, count in ((ONE, 1), (SPLIT_ACTOR, 2))
    )
    assert_equal(*runs, record_property)


@pytest.mark.all
@pytest.mark.parametrize("name", [name for name in FOUR_RANKS if name not in IN_EVERY_TEST])
def test_nor_does_any_other_plan(parameters, alone, name, record_property):
    assert_equal(alone, plan_matrix.run(parameters, FOUR_RANKS[name], name), record_property)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """Parameters of a run whose actor is a Qwen 3 with two key-value heads, and its run on one device."""
    given = plan_matrix.parameters(tmp_path_factory.mktemp("qwen3"), "qwen3", 2)
    return given, plan_matrix.run(given, ONE, "qwen3", num_devices=1)


@pytest.mark.all
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_nor_does_any_plan_for_qwen3(qwen3, name, record_property):
    """Under tp 4 two ranks have a copy of each key-value head."""
    given, alone = qwen3
    assert_equal(alone, plan_matrix.run(given, FOUR_RANKS[name], name), record_property)


@pytest.mark.all
def test_reals_example_on_eight_ranks_changes_nothing_either(parameters, alone, record_property):
    """And overlaps what ReaL's notes say: inference calls beside each other, then both trainings."""
    result = plan_matrix.run(parameters, REAL_EXAMPLE, "real_example", num_devices=8)
    assert_equal(alone, result, record_property)
    planned = {span["node"]: (span["start"], span["end"]) for span in result.spans}
    for step in range(plan_matrix.STEPS):
        beside = [planned[f"{call}@{step}"] for call in ("reward_inference", "ref_inference", "critic_inference")]
        assert max(start for start, _ in beside) < min(end for _, end in beside)
        (a, b), (c, d) = planned[f"actor_train@{step}"], planned[f"critic_train@{step}"]
        assert max(a, c) < min(b, d)
