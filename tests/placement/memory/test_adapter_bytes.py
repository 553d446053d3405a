"""Bytes of models with adapters: a base that several roles hold once, and training states of the adapters alone."""

from dataclasses import replace

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape
from prefect_rlhf.placement.layout.lending import lent_parameters
from prefect_rlhf.placement.layout.sharing import in_build_order, one_base, shared_weights, storage_name
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.savings import Savings, with_changes
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import num_parameters, parts
from prefect_rlhf.placement.plan import ExecutionPlan, instances
from prefect_rlhf.placement.planner.question import with_copies_agreed
from prefect_rlhf.placement.plans.check import check_plan
from tests.support.strategies import GIB, PROMPTS, QWEN2, QWEN3, SMALL, call, on, ppo

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
    apart_from_vllm = {"actor_generate": on("n0:0-1", "vllm", tp=2)}
    found = shares(graph, plan_of(graph, one, **apart_from_vllm))
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
    without = shares(apart(graph), plan_of(apart(graph), one, **apart_from_vllm))
    spared = sum(without.values()) - sum(found.values())
    lm_head = 0 if shape.tied_embeddings else shape.vocab_size * head
    assert spared == 2 * (2 * base["ref.megatron"] - lm_head), "the bases of actor and critic, which has no lm head"


@pytest.mark.parametrize("shape", [SMALL, QWEN2, QWEN3, replace(SMALL, vocab_size=509)])
@pytest.mark.parametrize("strategy", [{"dp": 2}, {"tp": 2}])
def test_vllm_holds_the_base_for_all_roles_in_megatron(shape, strategy):
    """But for queries, keys and values of several heads, and a vocabulary that is cut elsewhere."""
    graph, placed, tp = adapted(shape), on("n0:0-1", "megatron", **strategy), strategy.get("tp", 1)
    plan = plan_of(graph, placed, actor_generate=on("n0:0-1", "vllm", **strategy))
    (alike,) = one_base(graph, plan)
    assert [(each.role, each.engine) for each in alike][:2] == [("actor", "vllm"), ("ref", "megatron")]
    held = shared_weights(graph, plan)
    assert {(user.role, holder.engine) for user, each in held.items() for holder in each.values()} == {
        ("ref", "vllm"),
        ("critic", "megatron"),
        ("actor", "megatron"),
    }
    found = shares(graph, plan)
    assert found["actor.vllm", "base of actor, critic, ref"] > 0
    weights, lent = parts(graph.model("ref")), lent_names(graph, tp)
    every = [each for own in weights.values() for each in own]
    own = 2 * sum(each.elements_of(tp) for each in every if each.name not in lent)
    padding = 2 * shape.hidden_size * len(weights) if shape.vocab_size % tp and tp > 1 else 0
    assert own <= found.get(("ref.megatron", "rest of the base of actor, critic, ref"), 0) <= own + padding
    apart_from_vllm = plan_of(
        graph, placed, actor_generate=on("n0:0-1", "vllm", **({"tp": 2} if tp == 1 else {"dp": 2}))
    )
    assert shares(graph, apart_from_vllm)["ref.megatron", "base of actor, critic, ref"] > own


def lent_names(graph, tp):
    every = (lent_parameters(own, graph.model("ref"), "megatron", "vllm", tp) for own in graph.weights("ref"))
    return {name for names in every for name in names}


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"tp": 2},
        {"pp": 2},
        {"dp": 2, "mesh": "n0:0-1", "offload": "all"},
    ],
)
def test_another_split_or_an_offload_of_all_of_them_is_a_base_of_its_own(elsewhere):
    graph, offload = adapted(), elsewhere.pop("offload", "none")
    mesh = elsewhere.pop("mesh", "n0:0-1")
    placed = replace(on(mesh, "megatron", **elsewhere), offload=offload)
    cluster = ClusterShape("two", 1, 2, 8 * GIB, backend="cpu")
    plan = plan_of(graph, placed, actor_generate=replace(on("n0:0-1", "vllm", dp=2), offload=offload))
    plan = replace(check_plan(replace(plan, cluster=cluster), graph, cluster.whole), cluster=CLUSTER)
    assert not {
        holder for held in shared_weights(graph, plan).values() for holder in held.values() if holder.engine == "vllm"
    }


def test_weights_that_are_trained_whole_and_four_bits_are_never_lent():
    """vLLM does not compute from four bits, and trained weights have versions of their own."""
    graph, same = adapted(), on("n0:0-1", "megatron", dp=2)
    whole = replace(graph, models=tuple(replace(model, adapter=None, new_head=False) for model in graph.models))
    held = shared_weights(whole, plan_of(whole, same))
    assert not held
    models = tuple(replace(each, base_dtype="nf4") if each.adapter else each for each in graph.models)
    four_bits = replace(graph, models=models)
    with pytest.raises(InvalidInput, match=r"actor_generate\.engine: got 'vllm'"):
        check_plan(plan_of(four_bits, same), four_bits, CLUSTER.whole)


def test_the_role_that_holds_a_base_for_another_engine_is_built_first():
    """Here a reference is asked before the actor generates, and so is first in the plan."""
    calls = {each.name: each for each in adapted().calls}
    reads = {"prompts": ("prompt_tokens",)}
    asks = call("ref_inference", "inference", "ref", reads, ("logprobs",), rows=PROMPTS)
    order = [asks, *(each for name, each in calls.items() if name != "ref_inference")]
    graph = replace(adapted(), calls=tuple(order))
    plan = plan_of(graph, on("n0:0-1", "megatron", dp=2))
    assert [instance.role for instance in instances(graph, plan)][:2] == ["ref", "actor"]
    first, second = in_build_order(graph, plan)[:2]
    assert (first.engine, second.role, second.engine) == ("vllm", "ref", "megatron")


def test_an_offload_of_some_roles_of_a_base_that_vllm_holds_is_refused_in_one_line():
    """Also of vLLM alone, which on cuda stays."""
    graph, same = adapted(), on("n0:0-1", "megatron", dp=2)
    plan = plan_of(graph, same, ref_inference=replace(same, offload="all"))
    with pytest.raises(InvalidInput) as error:
        check_plan(plan, graph, CLUSTER.whole)
    assert str(error.value) == (
        "plan.calls.ref_inference.offload: got 'all', expected no offload: its base is in the memory of actor "
        "(vllm), which cannot leave, on n0:0-1"
    )
    cpu = ClusterShape("two", 1, 2, 8 * GIB, backend="cpu")
    plan = plan_of(graph, same, actor_generate=replace(on("n0:0-1", "vllm", dp=2), offload="all"))
    with pytest.raises(InvalidInput) as error:
        check_plan(replace(plan, cluster=cpu), graph, cpu.whole)
    assert str(error.value) == (
        "plan.calls.actor_generate.offload: got 'all', expected none, or all for each of actor (vllm), ref (megatron), "
        "critic (megatron), actor (megatron): they share a base, on n0:0-1"
    )


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
    """Frozen or trained, with an optimizer in host memory too, and in vLLM; models apart hold their own."""
    graph = adapted()
    calls = [graph.call(name) for name in ("ref_inference", "critic_inference", "actor_train_step")]
    assert len({storage_name(graph, call, TWO) for call in calls}) == 1
    train = calls[-1]
    assert storage_name(graph, train, replace(TWO, offload="optimizer")) == storage_name(graph, train, TWO)
    assert storage_name(graph, train, replace(TWO, offload="all")) == "actor megatron"
    assert storage_name(graph, graph.call("actor_generate"), on("n0:0-1", "vllm", tp=2)) == storage_name(
        graph, train, TWO
    )
    assert len({storage_name(apart(graph), call, TWO) for call in calls}) == 3
