"""Models of a known name are one base if one of them has an adapter: what a plan says of them, and which are others."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.forms.plan_options import plan_options
from prefect_rlhf.flows.planning.assumptions import assumed_of_models
from prefect_rlhf.flows.planning.notes import bases
from prefect_rlhf.flows.planning.record import public_range
from prefect_rlhf.flows.planning.what_if import read_question, with_named_bases
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.plan import ExecutionPlan
from tests.support.strategies import model, on

ADAPTER = AdapterSpec(8, 8.0, ("q_proj",))


def named(role, name="llama-7b", head="lm", **more):
    return replace(model(role, head), path=name, **more)


def contents(*models):
    return {role: each.content for role, each in with_named_bases({each.role: each for each in models}).items()}


def test_roles_that_name_a_model_share_its_weights_with_adapters():
    """A reward model without an adapter was trained from it, another name is another model, and so is a folder."""
    critic = named("critic", head="scalar", adapter=ADAPTER)
    reward, teacher = named("reward", head="scalar"), named("teacher", "llama-2-7b")
    judge = named("judge", content="/models/judge")
    found = contents(named("actor", adapter=ADAPTER), named("ref"), critic, reward, teacher, judge)
    assert found == {
        "actor": "llama-7b",
        "ref": "llama-7b",
        "critic": "llama-7b",
        "reward": "",
        "teacher": "",
        "judge": "/models/judge",
    }


def test_without_an_adapter_a_name_is_just_a_size():
    assert contents(named("actor"), named("ref"), named("critic", head="scalar")) == dict.fromkeys(
        ("actor", "ref", "critic"), ""
    )


QUESTION = {
    "algorithm": "grpo",
    "models": {"actor": "llama-7b"},
    "parameters": {"actor": {"adapter": {"rank": 16}}},
    "cluster": "1x1:h100",
    "prompt_length": "512",
    "response_length": "512",
    "batch_size": 16,
}


def asked(**changed):
    options = plan_options(QUESTION | changed)
    return read_question(find_flow(options.algorithm), options)


def test_a_plan_takes_the_key_of_a_run():
    """`-p actor.adapter.rank=16`: the actor trains an adapter, and the reference is its base; the answer says so."""
    question = asked()
    actor, ref = (question.graph.model(role) for role in ("actor", "ref"))
    assert (actor.adapter.rank, ref.adapter) == (16, None)
    assert actor.content == ref.content == "llama-7b"
    (line,) = assumed_of_models(question)
    assert line.startswith("actor and ref are the same llama-7b")
    one = on("n0:0", "megatron")
    placements = {
        call.name: on("n0:0", "vllm" if call.kind == "generate" else "python" if call.role is None else "megatron")
        for call in question.graph
    }
    plan = ExecutionPlan("plan", question.site.cluster, tuple(placements.items()))
    assert list(bases(question.graph, plan)) == ["vllm and megatron hold the base of actor, ref once, on n0:0 (dp1)"]
    assert placements["ref_inference"] == one
    assert public_range(question, plan) is None
    assert not list(assumed_of_models(asked(parameters={})))


def test_a_wrong_rank_is_refused_in_one_line():
    with pytest.raises(InvalidInput, match=r"actor\.adapter\.rank: got 0, expected"):
        asked(parameters={"actor": {"adapter": {"rank": 0}}})
