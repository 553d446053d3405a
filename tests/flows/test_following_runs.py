"""Runs whose reference follows the actor: its weights by hand, under several plans, and from a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file

from prefect_rlhf.engines.files.checkpoint_files import StoredState
from prefect_rlhf.flows.dpo import dpo
from prefect_rlhf.tasks.checkpoints.folders import folder_of, read_checkpoint
from tests.flows.test_adapter_runs import ADAPTER, dpo_plan, of_dpo
from tests.support.plan_matrix import Case, made_once
from tests.support.runs import loss_difference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect")]

STEPS, EVERY, SHARE = 4, 2, 0.25
FOLLOW = {"follow": {"every": EVERY, "share": SHARE}}


def following(folder):
    """The reference computes in bfloat16, its leader in float32."""
    given = of_dpo(folder)
    actor = {name: value for name, value in given["actor"].items() if name != "adapter"}
    return given | {
        "actor": actor,
        "ref": actor | {"dtype": "bfloat16"},
        "algo": given["algo"] | FOLLOW,
        "steps": STEPS,
        "keep_checkpoints": STEPS,
    }


def with_adapter(folder):
    given = following(folder)
    return given | {"actor": given["actor"] | {"adapter": ADAPTER}, "ref": given["actor"]}


PLANS = {
    "alone": dpo_plan("0", "0"),
    "split": dpo_plan("0-1 tp2", "0"),
    "away": dpo_plan("0-1 pp2 offload=all", "0") | {"actor_train": "0 engine=megatron offload=all"},
}
PLANS["away"]["actor_evaluation"] = PLANS["away"]["actor_train"]
CASES = {
    "two formats": Case(dpo, following, PLANS, ("preference_accuracy",)),
    "adapter": Case(dpo, with_adapter, PLANS, ("preference_accuracy",)),
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return made_once(CASES, lambda: tmp_path_factory.mktemp("following"))


def stored(run_dir, step, weights):
    """The float32 main weights in a checkpoint, by parameter."""
    parts = StoredState(folder_of(run_dir, step) / weights)
    shapes = {name: parts._parts["main", name][0].region for _, name in parts._parts}
    whole = {name: tuple((0, stop) for _, stop in regions(parts, name)) for name in shapes}
    return {name: parts.read("main", name, region) for name, region in whole.items()}


def regions(parts, name):
    """The end of each axis of a parameter."""
    held = [part.region for part in parts._parts["main", name]]
    return [max(axes, key=lambda axis: axis[1]) for axes in zip(*held, strict=True)]


def fingerprints(run_dir, step, weights):
    return read_checkpoint(folder_of(run_dir, step)).manifest.fingerprints[weights]


def by_hand(own, leader, share=SHARE):
    """An average as a torch loop over the parameters computes it."""
    return {name: own[name] * (1 - share) + leader[name] * share for name in own}


def assert_follows(result, part, before):
    """After steps 2 and 4 the reference is the average; after steps 1 and 3 it is as it was."""
    for step in range(1, STEPS + 1):
        held = stored(result.run_dir, step, f"ref.{part}")
        expected = before
        if step % EVERY == 0:
            expected = by_hand(before, stored(result.run_dir, step, f"actor.{part}"))
            assert any(not torch.equal(expected[name], before[name]) for name in expected)
        assert all(torch.equal(held[name], expected[name]) for name in expected), step
        before = held


def test_a_reference_becomes_the_average_bit_for_bit(ran):
    """Every second step, of its float32 weights, though it computes in bfloat16 and its leader in float32."""
    parameters, run = ran
    weights = load_file(f"{parameters('two formats')['ref']['path']}/model.safetensors")
    first = {name: values.bfloat16().float() for name, values in weights.items()}
    result = run("two formats")
    assert_follows(result, "trunk", {name: first[name] for name in stored(result.run_dir, 1, "ref.trunk")})
    assert [span["node"] for span in result.spans if span["kind"] == "follow"] == [
        "follow.ref.megatron@2",
        "follow.ref.megatron@4",
    ]


def test_its_content_does_not_depend_on_a_resume(ran):
    """Here the run is resumed after a step between two versions of the reference."""
    parameters, run = ran
    alone = run("two formats")
    checkpoint = folder_of(alone.run_dir, 3)
    given = parameters("two formats") | {"resume_from": str(checkpoint)}
    resumed = CASES["two formats"].run(given, "alone")
    name = "ref.trunk"
    assert fingerprints(resumed.run_dir, 4, name) == fingerprints(alone.run_dir, 4, name)
    assert fingerprints(resumed.run_dir, 4, name) != fingerprints(alone.run_dir, 3, name)
    assert torch.equal(*(stored(each.run_dir, 4, name)["model.norm.weight"] for each in (alone, resumed))), (
        "the main weights are restored, not the rounded ones"
    )


@pytest.mark.all
@pytest.mark.parametrize("plan", ["split", "away"])
def test_a_whole_run_does_not_depend_on_the_plan_of_the_reference(ran, plan):
    alone, other = ran[1]("two formats"), ran[1]("two formats", plan)
    assert loss_difference(alone, other) < 1e-2, "a product in bfloat16 is rounded as it is split"
    assert fingerprints(other.run_dir, 1, "ref.trunk") == fingerprints(alone.run_dir, 1, "ref.trunk")
    weights = load_file(f"{ran[0]('two formats')['ref']['path']}/model.safetensors")
    first = {name: values.bfloat16().float() for name, values in weights.items()}
    assert_follows(other, "trunk", {name: first[name] for name in stored(other.run_dir, 1, "ref.trunk")})


@pytest.mark.all
@pytest.mark.parametrize("plan", [*PLANS])
def test_a_reference_of_an_adapted_actor_has_an_adapter_of_its_own(ran, plan):
    """It begins as the actor does, so the first version is the actor's too, and the base is in no checkpoint."""
    result = ran[1]("adapter", plan)
    folders = {each.name for each in folder_of(result.run_dir, 1).iterdir() if each.is_dir()}
    assert folders >= {"actor.adapter", "ref.adapter"} and not {"ref.trunk", "actor.trunk"} & folders
    first = stored(result.run_dir, 1, "ref.adapter")
    assert all(not values.any() for name, values in first.items() if "lora_B" in name)
    assert_follows(result, "adapter", first)
