"""Runs that train an adapter: the same whatever the plan, and from a checkpoint of it alone."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.tasks.checkpoints.folders import folder_of
from prefect_rlhf.tasks.running.journal import read_spans
from tests.support import plan_matrix
from tests.support.plan_matrix import COMPUTATIONS_OF_GRPO, OPTIMIZER, Case, grpo_plan, made_once, plan
from tests.support.runs import first_differences, loss_difference, prepared, weight_difference, whole
from tests.support.tiny import make_model, make_pairs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

ADAPTER = {"rank": 4, "alpha": 8.0}
TOLERANCE = 1e-5
TWO_DEVICES = whole(ClusterShape("matrix", 1, 2, 8 << 30))


def adapted(given, *roles):
    return {name: {**value, "adapter": ADAPTER} if name in roles else value for name, value in given.items()}


def of_grpo(folder):
    return adapted(plan_matrix.grpo_parameters(plan_matrix.parameters(folder)), "actor") | {"checkpoint_every": 1}


def of_four_bits(folder):
    """Of the actor's base, which is the reference too."""
    given = of_grpo(folder)
    return given | {"actor": {**given["actor"], "base_dtype": "nf4"}}


def of_ppo(folder):
    return adapted(plan_matrix.parameters(folder), "actor", "critic") | {"checkpoint_every": 1}


def of_shared_trunk(folder):
    return adapted(plan_matrix.shared_trunk(folder), "actor")


def of_dpo(folder):
    actor = {"path": make_model(folder / "actor", layers=4, hidden=128, heads=4), "dtype": "float32"}
    pairs = {"path": make_pairs(folder / "pairs.parquet", num_train=16, num_held_out=8)}
    given = {"pairs": pairs, "held_out": pairs | {"split": "held_out"}, "actor": actor, "ref": actor}
    algo = {"batch_size": 8, "optimizer": OPTIMIZER}
    return adapted(given, "actor") | {
        "algo": algo,
        "output_dir": str(folder / "runs"),
        "steps": 2,
        "checkpoint_every": 1,
    }


def dpo_plan(ref, actor):
    of_ref, of_actor = f"{ref} engine=megatron", f"{actor} engine=megatron"
    return {"ref_inference": of_ref, "ref_evaluation": of_ref, "actor_train": of_actor, "actor_evaluation": of_actor}


CASES = {
    "grpo": Case(
        grpo,
        of_grpo,
        {
            "alone": grpo_plan("0 engine=megatron", "0", "0", "0"),
            "split": grpo_plan("0-1 tp2 engine=vllm", "1", "0-1 tp2", "0-1 tp2 sequence_parallel=true"),
            "pipeline": grpo_plan("0-1 pp2 engine=megatron", "1", "0-1 pp2", "0-1 pp2"),
        },
        COMPUTATIONS_OF_GRPO,
    ),
    "grpo in four bits": Case(
        grpo,
        of_four_bits,
        {
            "alone": grpo_plan("0 engine=megatron", "0", "0", "0"),
            "split": grpo_plan("0-1 tp2 engine=megatron", "1", "0-1 tp2", "0-1 pp2 recompute=all"),
        },
        COMPUTATIONS_OF_GRPO,
    ),
    "ppo": Case(
        ppo,
        of_ppo,
        {
            "alone": plan("0 engine=megatron", "0", "0", "0", "0", "0"),
            "split": plan("0-1 tp2 engine=megatron", "1", "0-1 tp2", "0-1 dp2", "0-1 pp2 recompute=all", "0-1 dp2"),
        },
    ),
    "ppo, both heads on one trunk": Case(
        ppo,
        of_shared_trunk,
        {
            "alone": plan_matrix.TRUNK_PLANS["alone"],
            "split": plan_matrix.TRUNK_PLANS["shards, and generation in a pipeline"],
        },
    ),
    "dpo": Case(
        dpo, of_dpo, {"alone": dpo_plan("0", "0"), "split": dpo_plan("0-1 tp2", "0-1 pp2")}, ("preference_accuracy",)
    ),
}
IN_EVERY_TEST = "grpo"
EACH = [pytest.param(name, marks=() if name == IN_EVERY_TEST else pytest.mark.all) for name in CASES]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return made_once(CASES, lambda: tmp_path_factory.mktemp("adapters"))


def assert_equal(one, other):
    assert not first_differences(one, other)
    assert loss_difference(one, other) < TOLERANCE
    assert weight_difference(one, other) < TOLERANCE


@pytest.mark.all  # test_adapters_in_vllm.py trains one
@pytest.mark.parametrize("case", EACH)
def test_a_run_resumes_from_its_adapter_under_another_plan(ran, case):
    """A checkpoint has the adapter and no base; the second step is that of the run which went on."""
    parameters, run = ran
    whole = run(case)
    checkpoint = folder_of(whole.run_dir, 1)
    sets = {folder.name for folder in checkpoint.iterdir() if folder.is_dir() and folder.name.startswith("actor.")}
    assert sets == {"actor.adapter", *(["actor.scalar_head"] if "trunk" in case else [])}
    resumed = CASES[case].run(parameters(case) | {"resume_from": str(checkpoint)}, "split")
    assert resumed.metrics[-1]["step"] == whole.metrics[-1]["step"] == 2
    assert weight_difference(whole, resumed) < TOLERANCE


@pytest.mark.all
@pytest.mark.parametrize(("case", "plan"), [(name, plan) for name in CASES for plan in [*CASES[name].plans][1:]])
def test_plans_do_not_change_adapter_training(ran, case, plan):
    """Tokens, losses, gradient norms and weights."""
    assert_equal(ran[1](case), ran[1](case, plan))


@pytest.mark.all
@pytest.mark.parametrize("case", ["grpo", "grpo in four bits"])
def test_a_certificate_counts_what_split_adapters_hold(ran, case):
    """Under tp and pp, with vLLM or with four bits: what each rank reported of any task run, and at most 2% more."""
    result = ran[1](case, "split")
    given = ran[0](case) | {"plan": str(result.run_dir.parent.parent / "split.json")}
    held = dict(prepared(CASES[case].flow, given, TWO_DEVICES).chosen.certificate.most_resident)
    for rank in ("0", "1"):
        found = max(span.device_bytes.get(rank, 0) for span in read_spans(result.run_dir))
        assert found <= held[f"n0:{rank}"] <= 1.02 * found, rank


@pytest.mark.all
def test_the_reference_of_an_actor_in_four_bits_has_a_kl_of_zero_at_first(ran):
    """Up to how many rows are multiplied at once; nothing of the base is written."""
    result = ran[1]("grpo in four bits")
    (kl,) = (value for name, value in result.metrics[0].items() if name.endswith("initial_kl_per_token"))
    assert abs(kl) < 1e-9
    assert all("lora" in name for name in result.weights["actor"])


def test_an_adapter_is_trained_and_its_base_is_not(ran):
    """And until its first update the actor is its reference, up to how many rows are multiplied at once."""
    parameters, run = ran
    result, given = run(IN_EVERY_TEST), parameters(IN_EVERY_TEST)
    base = load_file(Path(given["actor"]["path"]) / "model.safetensors")
    weights = result.weights["actor"]
    assert all((weights[name] == values).all() for name, values in base.items() if name in weights)
    moved = {name: float(values.abs().max()) for name, values in weights.items() if "lora_B" in name}
    assert len(moved) == 7 * 4 and all(value > 100 * TOLERANCE for value in moved.values())
    (kl,) = (value for name, value in result.metrics[0].items() if name.endswith("initial_kl_per_token"))
    assert abs(kl) < 1e-9
