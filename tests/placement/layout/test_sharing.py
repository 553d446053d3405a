"""Instances that split the same frozen weights alike on the same devices hold them once."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.graph import DataflowGraph, Dataset
from prefect_rlhf.placement.layout.sharing import shared_weights, storage_name
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.models.weights import num_parameters
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.plans.switch import closed_instances
from tests.support.strategies import GIB, QWEN3, SMALL, call, model, on

CLUSTER = ClusterShape("two", 1, 2, 8 * GIB)
ROLLOUT = ("tokens", "prompt_length", "logprobs")
WORK = Workload.fixed(12, 4)
TWO = on("n0:0-1", "megatron", tp=2)


def judged(judge="scalar", shape=SMALL) -> DataflowGraph:
    """An actor is trained by what a reference and a judge on the same folder say."""
    scores = {"actor_generate": ROLLOUT, "ref_inference": ("logprobs",), "judge_inference": ("values",)}
    calls = (
        call("actor_generate", "generate", "actor", {"prompts": ("prompt_tokens",)}, ROLLOUT),
        call("ref_inference", "inference", "ref", {"actor_generate": ROLLOUT[:2]}, ("logprobs",)),
        call("judge_inference", "inference", "judge", {"actor_generate": ROLLOUT[:2]}, ("values",)),
        call("actor_train_step", "train_step", "actor", scores),
    )
    models = (
        model("actor", shape=shape),
        replace(model("ref", shape=shape), content="/models/base"),
        replace(model("judge", judge, shape), content="/models/base"),
    )
    return DataflowGraph("judged", models, (Dataset("prompts", ("prompt_tokens",), 8),), calls)


def plan(graph, **changed) -> ExecutionPlan:
    placed = {
        "actor_generate": on("n0:0-1", "vllm", dp=2),
        "ref_inference": TWO,
        "judge_inference": TWO,
        "actor_train_step": on("n0:0-1", "megatron", dp=2),
    } | changed
    return ExecutionPlan("plan", CLUSTER, tuple((each.name, placed[each.name]) for each in graph))


def shared(graph, plan):
    """(role, weights, role that holds them)."""
    found = shared_weights(graph, plan)
    return [(i.role, name, holder.role) for i, held in found.items() for name, holder in held.items()]


def test_models_of_the_same_folder_name_the_same_frozen_weights():
    """By the first of them; heads of their own stay their own, and trained weights are never shared."""
    graph = judged(shape=QWEN3)
    assert [own.name for own in graph.weights("ref")] == ["ref.trunk", "ref.lm_head"]
    assert [own.name for own in graph.weights("judge")] == ["ref.trunk", "judge.scalar_head"]
    trained = replace(graph, models=tuple(replace(each, content="/models/base") for each in graph.models))
    assert [own.name for own in trained.weights("actor")] == ["actor.trunk", "actor.lm_head"]
    names = [own.name for own in graph.all_weights()]
    assert len(names) == len(set(names)) == 5


@pytest.mark.parametrize("changed", [{"dtype": "float32"}, {"content": "/models/other"}, {"content": ""}])
def test_models_that_may_differ_name_weights_of_their_own(changed):
    """In another format, of another folder, or planned by a size alone."""
    graph = judged()
    other = replace(graph, models=(*graph.models[:2], replace(graph.models[2], **changed)))
    assert [own.name for own in other.weights("judge")] == ["judge.trunk", "judge.scalar_head"]
    assert not shared_weights(other, plan(other))


def with_judge(shape):
    """The graph whose judge has another shape."""
    graph = judged()
    return replace(graph, models=(*graph.models[:2], replace(graph.models[2], shape=shape)))


def test_models_that_name_the_same_weights_but_differ_in_shape_are_refused_in_one_line():
    with pytest.raises(GraphError) as error:
        with_judge(replace(SMALL, hidden_size=64))
    assert str(error.value) == (
        "flow judged: ref and judge name the same weights, ref.trunk, but model.embed_tokens.weight is (512, 128) in "
        "ref and (512, 64) in judge; read them from separate folders"
    )
    with pytest.raises(GraphError, match=r"model\.layers\.3\.\S+ is \(128,\) in ref and absent in judge"):
        with_judge(replace(SMALL, num_layers=3))


def test_the_same_place_shares_storage():
    graph = judged()
    assert shared(graph, plan(graph)) == [("judge", "ref.trunk", "ref")]


@pytest.mark.parametrize(
    "elsewhere",
    [
        on("n0:0-1", "megatron", dp=2),
        on("n0:0", "megatron"),
        replace(TWO, device_order=(1, 0)),
        replace(TWO, offload="all"),
    ],
)
def test_another_strategy_mesh_order_or_offload_has_its_own_storage(elsewhere):
    graph = judged()
    assert not shared_weights(graph, plan(graph, judge_inference=elsewhere))


def test_a_last_stage_with_a_copy_of_the_embedding_shares_with_its_like_alone():
    """With a tied lm head, the last stage of a pipeline has the embedding, too."""
    pipeline = on("n0:0-1", "megatron", pp=2)
    placed = {"ref_inference": pipeline, "judge_inference": pipeline}
    assert not shared_weights(judged("scalar"), plan(judged("scalar"), **placed))
    both = judged("lm+scalar")
    assert shared(both, plan(both, **placed)) == [("judge", "ref.trunk", "ref")]


@pytest.mark.parametrize(
    ("shape", "judge"), [(SMALL, "scalar"), (SMALL, "lm"), (QWEN3, "lm+scalar"), (QWEN3, "scalar")]
)
@pytest.mark.parametrize("strategy", [TWO, on("n0:0-1", "megatron", dp=2)])
def test_a_certificate_counts_a_storage_once(shape, judge, strategy):
    """A device holds less by all that the judge does not hold itself, divided over tp; norms are on every device."""
    together, apart = judged(judge, shape), judged(judge, shape)
    apart = replace(apart, models=tuple(replace(each, content="") for each in apart.models))
    placed = {"ref_inference": strategy, "judge_inference": strategy}
    bytes_of = [
        dict(certify_plan(plan(graph, **placed), graph, WORK, "cuda").most_resident) for graph in (apart, together)
    ]
    heads = (each for each in together.weights("judge") if each.name.startswith("judge."))
    own = sum(parameter.num_elements for head in heads for parameter in head.parameters)
    spared = {device: most - bytes_of[1][device] for device, most in bytes_of[0].items()}
    whole = 2 * (num_parameters(together.model("judge")) - own)
    if strategy.strategy.tp == 1:
        assert set(spared.values()) == {whole}
    else:
        assert all(whole / 2 <= bytes_spared < 0.6 * whole for bytes_spared in spared.values())


def test_a_certificate_names_all_roles_of_a_storage():
    graph = judged("lm")
    text = certify_plan(plan(graph), graph, WORK, "cuda").table()
    assert "ref.megatron n0:0-1 tp2: base of ref, judge" in text
    assert "judge.megatron n0:0-1 tp2: weights" not in text, "it has nothing of its own"


def test_calls_that_can_share_weights_are_one_copy_in_the_search():
    """Where their meshes are equal. An offloaded one holds its own; a trained model is never part of it."""
    graph = judged()
    ref, judge, actor = (graph.call(f"{name}") for name in ("ref_inference", "judge_inference", "actor_train_step"))
    assert storage_name(graph, ref, TWO) == storage_name(graph, judge, TWO)
    assert storage_name(graph, judge, replace(TWO, offload="all")) == "judge megatron"
    assert storage_name(graph, actor, TWO) == "actor megatron"
    plain = replace(graph, models=tuple(replace(each, content="") for each in graph.models))
    assert storage_name(plain, ref, TWO) == "ref megatron"


def test_an_instance_is_built_anew_if_a_switch_takes_the_holder_of_its_weights():
    """To a plan in which the reference is elsewhere: the judge then has to hold its own trunk."""
    graph = judged()
    before, after = plan(graph), plan(graph, ref_inference=on("n0:0-1", "megatron", dp=2))
    assert {each.role for each in closed_instances(graph, before, after)} == {"ref", "judge"}
    assert {each.role for each in closed_instances(graph, after, before)} == {"ref", "judge"}
    assert len(instances(graph, before)) == 4


def test_an_instance_is_built_anew_if_the_holder_of_its_weights_is():
    """Here for other parts of the reference's rows: the memory of its weights ends with it."""
    graph = judged()
    before, after = plan(graph), plan(graph, ref_inference=replace(TWO, parts=2))
    assert {each.role for each in closed_instances(graph, before, after)} == {"ref", "judge"}
    other = plan(graph, judge_inference=replace(TWO, parts=2))
    assert {each.role for each in closed_instances(graph, before, other)} == {"judge"}
