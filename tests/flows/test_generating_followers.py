"""Followers that generate, in either engine: their weights, a resume, and a switch from plan to plan."""

from itertools import product

import pytest

from prefect_rlhf import (
    Batch,
    Computed,
    Model,
    Optimizer,
    Prompts,
    Sampling,
    Settings,
    computation,
    computations,
    compute,
    follow,
    generate,
    inference,
    losses,
    rlhf_flow,
    train_step,
)
from prefect_rlhf.engines.cpu_products import has_bfloat16
from prefect_rlhf.tasks.checkpoints.folders import folder_of
from prefect_rlhf.tasks.running.journal import read_spans
from tests.flows.test_adapter_runs import ADAPTER, TWO_DEVICES
from tests.flows.test_following_runs import assert_follows, fingerprints, stored
from tests.support.plan_matrix import OPTIMIZER, Case, made_once
from tests.support.runs import Result, end, first_differences, leased, plan_file, prepared, weight_difference
from tests.support.tiny import make_model, make_prompts

pytestmark = [pytest.mark.all, pytest.mark.slow, pytest.mark.usefixtures("prefect")]

STEPS, EVERY, SHARE = 4, 2, 0.25
TOLERANCE = 1e-5


class Rival(Settings):
    """Its share in the next version is SHARE."""

    batch_size: int = 8
    sampling: Sampling = Sampling(max_new_tokens=6)
    optimizer: Optimizer = Optimizer(**OPTIMIZER)


RIVAL = Rival()


@computation("advantages", "scores")
def surer(against: Batch, policy: Batch, scores: Batch, settings: Rival) -> Computed:
    """How much likelier the rival finds its own tokens than the policy does: [B, T]."""
    difference_BT = (scores["logprobs"] - policy["logprobs"]) * against.mask("logprobs")
    return Computed({"advantages": difference_BT, "scores": difference_BT.sum(1)})


@rlhf_flow("learns-from-a-follower")
def learns_from_a_follower(prompts: Prompts, actor: Model, ref: Model, algo: Rival = RIVAL) -> None:
    """The policy learns from answers of a model that follows it, which also says how likely they are."""
    against = generate(ref, prompts, batch_size=algo.batch_size, sampling=algo.sampling)
    rival = inference(ref, against, output="logprobs")
    policy = inference(actor, against, output="logprobs")
    advantages = compute(surer, against, policy, rival, settings=algo)
    compute(computations.record_rollouts, against, advantages, advantages, settings=algo)
    train_step(actor, losses.nll(algo).on(against), optimizer=algo.optimizer)
    follow(ref, actor, every=EVERY, share=SHARE)


def parameters(folder):
    """The follower computes in bfloat16, its leader in float32."""
    actor = {"path": make_model(folder / "actor", layers=4, hidden=128, heads=4), "dtype": "float32"}
    return {
        "prompts": {"path": make_prompts(folder / "prompts.parquet", num_train=8)},
        "actor": actor,
        "ref": actor | {"dtype": "bfloat16"},
        "output_dir": str(folder / "runs"),
        "steps": STEPS,
        "checkpoint_every": 1,
        "keep_checkpoints": STEPS,
    }


def in_float32(folder):
    given = parameters(folder)
    return given | {"ref": given["actor"]}


def with_adapter(folder):
    given = in_float32(folder)
    return given | {"actor": given["actor"] | {"adapter": ADAPTER}}


def plan(generates, infers, trains):
    return {
        "ref_generate": generates,
        "ref_inference": f"{infers} engine=megatron",
        "actor_inference": f"{trains} engine=megatron",
        "actor_train": f"{trains} engine=megatron",
    }


PLANS = {
    "alone": plan("0 engine=megatron", "0", "0"),
    "vllm": plan("0 engine=vllm", "0", "0"),
    "split": plan("0-1 tp2 engine=vllm", "1", "0-1 pp2"),
    "away": plan("0 engine=vllm offload=all", "0-1 tp2 offload=all", "0-1 tp2 offload=all"),
}
COMPUTATIONS = ("surer", "record_rollouts")
CASES = {
    name: Case(learns_from_a_follower, of, PLANS, COMPUTATIONS)
    for name, of in {"two formats": parameters, "float32": in_float32, "adapter": with_adapter}.items()
}
PART = {"two formats": "trunk", "float32": "trunk", "adapter": "adapter"}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return made_once(CASES, lambda: tmp_path_factory.mktemp("rivals"))


def first_version(case, run_dir):
    """The follower's weights at the first step, before it follows."""
    return stored(run_dir, 1, f"ref.{PART[case]}")


@pytest.mark.parametrize(("case", "plan"), list(product(CASES, PLANS)))
def test_both_engines_hold_the_average(ran, case, plan):
    """Bit for bit: in vLLM, which generates with it, and in Megatron, both of which follow by themselves."""
    result = ran[1](case, plan)
    assert_follows(result, PART[case], first_version(case, result.run_dir))
    nodes = {span.node for span in read_spans(result.run_dir) if span.kind == "follow"}
    engines = ("megatron",) if plan == "alone" else ("megatron", "vllm")
    assert nodes == {f"follow.ref.{engine}@{step}" for engine in engines for step in (2, 4)}


@pytest.mark.parametrize("plan", ["vllm", "split"])
def test_a_certificate_counts_a_followers_float32_weights_in_vllm(ran, plan):
    """What each rank reported of any task run, and at most 2% more.

    It counts vLLM's packed copies, which a processor without bfloat16 does not make.
    """
    result = ran[1]("two formats", plan)
    given = ran[0]("two formats") | {"plan": str(result.run_dir.parent.parent / f"{plan}.json")}
    certificate = prepared(learns_from_a_follower, given, TWO_DEVICES).chosen.certificate
    held, shares = dict(certificate.most_resident), {peak.device: peak.shares for peak in certificate.peaks}
    for rank in sorted({rank for span in read_spans(result.run_dir) for rank in span.device_bytes}):
        found = max(span.device_bytes.get(rank, 0) for span in read_spans(result.run_dir))
        packed = sum(share.num_bytes for share in shares[f"n0:{rank}"] if share.what == "packed weights")
        not_made = 0 if has_bfloat16() else packed
        assert found <= held[f"n0:{rank}"] <= 1.02 * found + not_made, rank


@pytest.mark.parametrize("case", ["float32", "adapter"])
@pytest.mark.parametrize("plan", ["vllm", "split", "away"])
def test_a_followers_answers_do_not_depend_on_the_engine(ran, case, plan):
    one, other = ran[1](case), ran[1](case, plan)
    assert not first_differences(one, other)
    assert weight_difference(one, other) < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_a_follower_in_vllm_is_the_same_after_a_resume(ran, case):
    """After a step between two of its versions."""
    whole = ran[1](case, "vllm")
    given = ran[0](case) | {"resume_from": str(folder_of(whole.run_dir, 3))}
    resumed = CASES[case].run(given, "vllm")
    assert resumed.tokens == whole.tokens
    name = f"ref.{PART[case]}"
    assert fingerprints(resumed.run_dir, 4, name) == fingerprints(whole.run_dir, 4, name)
    one, other = (stored(each.run_dir, 4, name) for each in (whole, resumed))
    assert all((other[key] == values).all() for key, values in one.items())


@pytest.mark.parametrize("case", CASES)
def test_a_run_with_a_follower_switches_plans(ran, case, tmp_path):
    """Between two versions of the follower and right after one; its float32 weights go along."""
    files = {name: str(plan_file(PLANS[name], tmp_path / f"{name}.json", COMPUTATIONS)) for name in PLANS}
    given = ran[0](case) | {"plan": {1: files["alone"], 2: files["split"], 4: files["away"]}}
    with leased(2):
        switched = Result.of(end(learns_from_a_follower, given))
    assert [span.title for span in read_spans(switched.run_dir) if span.kind == "switch"] == [
        "switch · step 2 · alone → split",
        "switch · step 4 · split → away",
    ]
    assert_follows(switched, PART[case], first_version(case, switched.run_dir))
    if case != "two formats":
        stayed = ran[1](case)
        assert not first_differences(stayed, switched)
        assert weight_difference(stayed, switched) < TOLERANCE
