"""Bytes of models with adapters: a base that several roles hold once, and training states of the adapters alone."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.layout.sharing import one_base, shared_weights, storage_name
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.savings import Savings, with_changes
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import num_parameters, parts
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.planner.question import with_copies_agreed
from prefect_rlhf.placement.plans.check import check_plan
from tests.strategies import GIB, QWEN3, SMALL, on, ppo

pytestmark = pytest.mark.quick

CLUSTER = ClusterShape("two", 1, 2, 8 * GIB)
WORK = Workload.fixed(12, 4)
TWO = on("n0:0-1", "megatron", tp=2)
ADAPTER = AdapterSpec(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
BASE = "/models/base"


def adapted(shape=SMALL, **contents):
    """PPO whose actor and critic are adapters on the model that the reference is; the reward model is another."""
    changed = {"actor": {"adapter": ADAPTER}, "critic": {"adapter": ADAPTER, "new_head": True}, "ref": {}, "reward": {}}
    base = {"actor": BASE, "critic": BASE, "ref": BASE, "reward": ""} | contents
    models = (replace(model, shape=shape, content=base[model.role], **changed[model.role]) for model in ppo().models)
    return replace(ppo(), models=tuple(models))


def apart(graph):
    """The same models, of which each has a base of its own."""
    return replace(graph, models=tuple(replace(model, content="") for model in graph.models))


def plan_of(graph, placed=TWO, **changed):
    placements = {call.name: placed for call in graph} | {"actor_generate": on("n0:0-1", "vllm", dp=2)} | changed
    placements["advantages"] = on("n0:0", "python")
    return ExecutionPlan("plan", CLUSTER, tuple((call.name, placements[call.name]) for call in graph))


def shares(graph, plan, device="n0:0"):
    peak = next(peak for peak in certify_plan(plan, graph, WORK, "cuda").peaks if peak.device == device)
    return {(share.owner.partition(" ")[0], share.what): share.num_bytes for share in peak.shares}


def test_actor_reference_and_critic_hold_their_base_once():
    graph = adapted()
    found = {instance.role: holder for instance, holder in shared_weights(graph, plan_of(graph)).items()}
    assert {role: {each.role for each in held.values()} for role, held in found.items()} == {
        "actor": {"ref"},
        "critic": {"ref"},
    }
    (alike,) = one_base(graph, plan_of(graph))
    assert [instance.role for instance in alike] == ["ref", "critic", "actor"]


def test_a_certificate_names_a_base_by_all_its_roles():
    graph = adapted()
    text = certify_plan(plan_of(graph), graph, WORK, "cuda").table()
    assert "ref.megatron n0:0-1 tp2: base of actor, critic, ref" in text
    assert "actor.megatron n0:0-1 tp2: adapter" in text and "actor.megatron n0:0-1 tp2: weights" not in text


@pytest.mark.parametrize("shape", [SMALL, QWEN3])
def test_a_base_is_counted_once_and_an_adapter_with_its_states_for_each_trained_role(shape):
    graph, one = adapted(shape), on("n0:0-1", "megatron", dp=2)
    found = shares(graph, plan_of(graph, one))
    own = {role: sum(each.num_elements for each in parts(graph.model(role))["adapter"]) for role in ("actor", "critic")}
    head = shape.hidden_size
    base = {
        "ref.megatron": num_parameters(graph.model("ref")),
        "reward.megatron": num_parameters(graph.model("reward")),
    }
    assert found["ref.megatron", "base of actor, critic, ref"] == 2 * base["ref.megatron"]
    assert found["reward.megatron", "weights"] == 2 * base["reward.megatron"]
    assert not {owner for owner, what in found if what == "weights"} & {"actor.megatron", "critic.megatron"}
    for role, elements in (("actor", own["actor"]), ("critic", own["critic"] + head)):
        assert elements <= found[f"{role}.megatron", "adapter"] / 2 <= elements + 256
        assert found[f"{role}.megatron", "gradients"] == 2 * found[f"{role}.megatron", "adapter"]
        assert found[f"{role}.megatron", "optimizer"] <= 3 * found[f"{role}.megatron", "adapter"] + 4 * 64
    without = shares(apart(graph), plan_of(apart(graph), one))
    spared = sum(without.values()) - sum(found.values())
    lm_head = 0 if shape.tied_embeddings else shape.vocab_size * head
    assert spared == 2 * (2 * base["ref.megatron"] - lm_head), "the bases of actor and critic, which has no lm head"


def test_a_plan_says_of_an_offload_of_a_part_of_the_roles_of_a_base_which_these_are():
    """A base leaves its devices for all of them or for none; the optimizer of an adapter may leave alone."""
    graph = adapted()
    plan = plan_of(graph, ref_inference=replace(TWO, offload="all"))
    with pytest.raises(InvalidInput) as error:
        check_plan(plan, graph, CLUSTER.whole)
    assert str(error.value) == (
        "plan.calls.ref_inference.offload: got 'all', expected none, or all for each of actor, critic, ref: they share "
        "a base, on n0:0-1"
    )
    every = {call.name: replace(TWO, offload="all") for call in graph if call.role and call.kind != "generate"}
    check_plan(plan_of(graph, **every), graph, CLUSTER.whole)
    optimizer = plan_of(graph, actor_train_step=replace(TWO, offload="optimizer"))
    check_plan(optimizer, graph, CLUSTER.whole)
    assert shared_weights(graph, optimizer).keys() == shared_weights(graph, plan_of(graph)).keys()


def test_copies_of_a_base_stay_unless_all_leave():
    graph = adapted()
    away = {"ref_inference": replace(TWO, offload="all"), "actor_train_step": replace(TWO, offload="all")}
    agreed = with_copies_agreed(plan_of(graph, **away), graph)
    assert (agreed["ref_inference"].offload, agreed["actor_train_step"].offload) == ("none", "optimizer")
    check_plan(agreed, graph, CLUSTER.whole)


def test_savings_move_a_base_with_all_its_roles():
    """And take it back with all of them, if the plan fits."""
    graph = adapted()
    savings, plan = Savings(graph, WORK, "cuda"), plan_of(graph)
    for saving in savings.all_of(plan):
        check_plan(saving, graph, CLUSTER.whole)
    least = savings.all_of(plan)[-1]
    assert {least[name].offload for name in ("ref_inference", "actor_train_step", "critic_inference")} == {"all"}
    reward = next(each for each in instances(graph, plan) if each.role == "reward")
    away = with_changes(least, instances(graph, plan)[reward], offload="none")
    relaxed = savings._relaxed(away, plan)
    assert {relaxed[call.name].offload for call in graph} == {"none"}


def test_an_adapted_role_and_its_base_are_one_copy_in_the_search():
    """Frozen or trained, with an optimizer in host memory too; vLLM and models apart hold their own."""
    graph = adapted()
    calls = [graph.call(name) for name in ("ref_inference", "critic_inference", "actor_train_step")]
    assert len({storage_name(graph, call, TWO) for call in calls}) == 1
    train = calls[-1]
    assert storage_name(graph, train, replace(TWO, offload="optimizer")) == storage_name(graph, train, TWO)
    assert storage_name(graph, train, replace(TWO, offload="all")) == "actor"
    assert storage_name(graph, graph.call("actor_generate"), on("n0:0-1", "vllm", dp=2)) == "actor"
    assert {storage_name(apart(graph), call, TWO) for call in calls} == {"ref", "critic", "actor"}
