"""Plans that cannot run are refused in one line that names the field, the value and what would be right."""

from dataclasses import replace
from functools import partial

import pytest

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement import engine_traits
from prefect_rlhf.placement.devices.mesh import ClusterShape, DeviceMesh
from prefect_rlhf.placement.engine_traits import EngineTraits, engines_of
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.model import Experts
from prefect_rlhf.placement.planner.preset_plan import preset
from prefect_rlhf.placement.plans.check import able_engines, check_plan, violations
from prefect_rlhf.placement.row_set import Choice
from tests.support.strategies import GIB, MIXTURE, SMALL, dpo, model, on, placed, ppo, remax

pytestmark = pytest.mark.quick

CLUSTER = ClusterShape("desk", 2, 4, 64 * GIB)
LEASE = DeviceMesh(0, 1, 0, 4)
PPO = ppo(mini_batches=2)
GOOD = preset("flattening", replace(PPO, calls=tuple(replace(c, num_rows=32) for c in PPO)), CLUSTER, LEASE)
GRAPH = replace(PPO, calls=tuple(replace(c, num_rows=32) for c in PPO))


def reshaped(**changes):
    """The graph with another shape for every model."""
    return replace(GRAPH, models=tuple(replace(m, shape=replace(SMALL, **changes)) for m in GRAPH.models))


MIXTURES = replace(GRAPH, models=tuple(replace(m, shape=MIXTURE) for m in GRAPH.models))


def without(name):
    return replace(GOOD, placements=tuple(entry for entry in GOOD.placements if entry[0] != name))


def twice(name):
    return replace(GOOD, placements=(*GOOD.placements, (name, GOOD[name])))


def also(name, placement):
    return replace(GOOD, placements=(*GOOD.placements, (name, placement)))


ref, generate, computed = (partial(placed, GOOD, name) for name in ("ref_inference", "actor_generate", "advantages"))
"""The good plan with some fields of that call changed."""


def with_rows(graph, num_rows):
    return replace(graph, calls=tuple(replace(c, num_rows=num_rows) for c in graph))


DPO_PLAN = preset("flattening", dpo(), CLUSTER, LEASE)

BAD = {
    "unknown call": (also("actor_genrate", on("n0:0-3", "vllm", dp=4)), "plan.calls: got 'actor_genrate'"),
    "missing call": (without("ref_inference"), "for every call of flow ppo, also ref_inference"),
    "call placed twice": (twice("ref_inference"), "plan.calls.ref_inference: got '2 placements'"),
    "node outside the cluster": (ref(mesh="n2:0-3"), "nodes 0 to 1 of cluster desk"),
    "device outside the node": (ref(mesh="n0:4-7"), "devices 0 to 3 of each node"),
    "mesh not aligned": (ref(mesh="n0:1-2", dp=2), "an aligned power-of-two slice"),
    "mesh of three": (ref(mesh="n0:0-2", dp=3), "an aligned power-of-two slice"),
    "unknown engine": (
        ref(engine="sglang"),
        "plan.calls.ref_inference.engine: got 'sglang', expected megatron, which runs inference",
    ),
    "mesh outside the lease": (ref(mesh="n1:0-3"), "devices of the leased mesh n0:0-3"),
    "mesh larger than the lease": (ref(mesh="n0-1:0-3", dp=8), "plan.calls.ref_inference.mesh: got 'n0-1:0-3'"),
    "experts of a dense model": (ref(ep=2), "plan.calls.ref_inference.ep: got 2, expected 1: ref has no experts"),
    "replicas that do not divide by ep": (
        ref(ep=3),
        "plan.calls.ref_inference.ep: got 3, expected a divisor of dp 4",
        MIXTURES,
    ),
    "experts that do not divide by ep": (
        ref(ep=4),
        "plan.calls.ref_inference.ep: got 4, expected a divisor of the 6 experts of ref",
        reshaped(experts=Experts(6, 2)),
    ),
    "some replicas of vllm share experts": (
        generate(ep=2),
        "actor_generate.ep: got 2, expected 1 or 4, its dp: vllm divides the 8 experts of actor over all 4 devices or",
        MIXTURES,
    ),
    "tp and experts": (
        ref(dp=2, tp=2),
        "of the 255 columns of an expert of ref",
        reshaped(experts=Experts(8, 2), intermediate_size=255),
    ),
    "ep of a computation": (computed(ep=2), "advantages.ep: got 2, expected 1: a computation"),
    "ep of zero": (ref(ep=0), "ref_inference.ep: got 0, expected 1 or more"),
    "too few devices": (ref(dp=2), "dp 2 * tp 1 * pp 1 = 2', expected 4"),
    "too many devices": (generate(tp=2), "dp 4 * tp 2 * pp 1 = 8', expected 4"),
    "dp of zero": (ref(dp=0), "plan.calls.ref_inference.dp: got 0, expected 1 or more"),
    "negative pp": (ref(pp=-1), "plan.calls.ref_inference.pp: got -1"),
    "no micro-batches": (ref(micro_batches=0), "ref_inference.micro_batches: got 0"),
    "tp and heads": (
        ref(dp=2, tp=2),
        "plan.calls.ref_inference.tp: got 2, expected a divisor of the 9 attention heads of ref",
        reshaped(num_attention_heads=9, num_kv_heads=3),
    ),
    "tp and key-value heads": (
        ref(dp=1, tp=4),
        "ref_inference.tp: got 4, expected a divisor or a multiple of the 3 key-value heads of ref",
        reshaped(num_attention_heads=12, num_kv_heads=3),
    ),
    "tp and feed-forward": (
        ref(dp=2, tp=2),
        "of the 255 columns of the feed-forward layer",
        reshaped(intermediate_size=255),
    ),
    "more stages than layers": (
        ref(dp=1, pp=4),
        "plan.calls.ref_inference.pp: got 4, expected at most 3, the layers of ref",
        reshaped(num_layers=3),
    ),
    "an order that leaves out a device": (
        ref(device_order=(0, 1, 2)),
        "plan.calls.ref_inference.order: got [0, 1, 2], expected each of 0 to 3, the devices of mesh n0:0-3, once",
    ),
    "an order that names a device twice": (ref(device_order=(0, 1, 2, 2)), "[0, 1, 2, 2]"),
    "two orders of one copy": (
        placed(placed(GOOD, "critic_inference", mesh="n0:0-3"), "critic_inference", device_order=(1, 0, 2, 3)),
        "plan.calls.critic_train_step.order: got [], expected [1, 0, 2, 3] as for critic_inference: both use critic.me",
    ),
    "pipeline in vllm": (generate(dp=2, pp=2), "plan.calls.actor_generate.pp: got 2"),
    "vllm that trains": (placed(GOOD, "actor_train_step", engine="vllm"), "megatron, which runs train_step"),
    "python that generates": (generate(engine="python"), "vllm or megatron, which"),
    "python that infers": (ref(engine="python"), "megatron, which runs inference"),
    "computation in megatron": (computed(engine="megatron"), "python, which runs compute"),
    "computation on two devices": (computed(mesh="n0:0-1"), "a mesh of a single device"),
    "computation in two replicas on two devices": (
        computed(mesh="n0:0-1", dp=2),
        "plan.calls.advantages: got 'n0:0-1 with dp 2 * tp 1 * pp 1 = 2', expected a mesh of a single device and dp 1",
    ),
    "offloaded computation": (computed(offload="all"), "offload: 'all' is not used: python holds no weights"),
    "micro-batches of a computation": (
        computed(micro_batches=2),
        "advantages.micro_batches: 2 is not used: python has no micro-batches",
    ),
    "micro-batches of vllm": (
        generate(micro_batches=4),
        "actor_generate.micro_batches: 4 is not used: vllm has no micro-batches, cache_gib limits",
    ),
    "a cache of megatron": (ref(cache_gib=4.0), "ref_inference.cache_gib: 4.0 is not used: megatron has no cache"),
    "recomputation without a backward pass": (
        ref(recompute="all"),
        "plan.calls.ref_inference.recompute: 'all' is not used: a call of kind inference has no backward pass",
    ),
    "recomputation of a generate": (generate(recompute=1), "actor_generate.recompute: 1 is not used: a call of kind"),
    "recomputation of a computation": (computed(recompute=1), "advantages.recompute: 1 is not used: a call of kind"),
    "more recomputed layers than a stage has": (
        placed(GOOD, "actor_train_step", pp=2, dp=2, recompute=3),
        "actor_train_step.recompute: got 3, expected all, or at most 2, the layers of a pipeline stage of actor",
    ),
    "sequence parallelism with tp 1": (
        placed(GOOD, "actor_train_step", sequence_parallel=True),
        "plan.calls.actor_train_step.sequence_parallel: True is not used: it divides tokens over tp, which is 1",
    ),
    "sequence parallelism without a backward pass": (
        ref(dp=2, tp=2, sequence_parallel=True),
        "ref_inference.sequence_parallel: True is not used: a call of kind inference saves no activations",
    ),
    "less than no recomputed layer": (
        placed(GOOD, "actor_train_step", recompute=-1),
        "actor_train_step.recompute: got -1, expected all, or a number of layers of 0 or more",
    ),
    "rows that move first to no call": (
        placed(GOOD, "actor_train_step", rows_first=True),
        "plan.calls.actor_train_step.rows_first: True is not used: no call reads its rows",
    ),
    "less than a part": (ref(parts=0), "plan.calls.ref_inference.parts: got 0, expected 1 or more"),
    "parts of a train_step": (
        placed(GOOD, "actor_train_step", parts=2),
        "actor_train_step.parts: 2 is not used: a call of kind train_step needs all rows of the step at once",
    ),
    "parts of a computation": (computed(parts=2), "advantages.parts: 2 is not used: a call of kind compute needs all"),
    "more parts than groups": (ref(parts=64), "ref_inference.parts: got 64, expected at most 32, the step's groups"),
    "parts that do not divide the groups": (
        generate(parts=3),
        "actor_generate.parts: got 3, expected a divisor of 32, the step's groups of rows",
    ),
    "parts that cut a pair": (
        placed(DPO_PLAN, "ref_inference", parts=8),
        "ref_inference.parts: got 8, expected at most 4, the step's groups of rows",
        dpo(),
    ),
    "parts with fewer rows than a pipeline has stages": (
        ref(dp=1, pp=4, parts=16),
        "parts: got 16, expected fewer: a part has 2 rows for each replica, too few for a pipeline of 4 stages",
    ),
    "more micro-batches than a part has rows": (
        ref(micro_batches=4, parts=4),
        "ref_inference.micro_batches: got 4, expected at most 2, the items that a replica has of a part",
    ),
    "more mini-batches than rows": (
        GOOD,
        "actor_train_step.rows: got '1 rows a step', expected at least 2, an item for each of 2 mini-batches",
        with_rows(GRAPH, 1),
    ),
    "more micro-batches than rows": (
        placed(GOOD, "actor_train_step", micro_batches=5),
        "actor_train_step.micro_batches: got 5, expected at most 4, the items that a replica has of a mini-batch",
    ),
    "a pair cut in two": (
        DPO_PLAN,
        "ref_inference.rows: got '7 rows a step', expected a multiple of 2",
        with_rows(dpo(), 7),
    ),
    "late reload of nothing": (
        ref(prefetch=False),
        "plan.calls.ref_inference.prefetch: False is not used: offload is none, so nothing is reloaded; remove it",
    ),
    "offload of half a copy": (
        placed(placed(GOOD, "critic_inference", mesh="n0:0-3"), "critic_inference", offload="all"),
        "plan.calls.critic_train_step.offload: got 'none', expected all as for critic_inference",
    ),
    "optimizer of a frozen model": (
        ref(offload="optimizer"),
        "plan.calls.ref_inference.offload: got 'optimizer', expected none or all: no call trains ref.megatron",
    ),
    "optimizer in vllm": (
        generate(offload="optimizer"),
        "plan.calls.actor_generate.offload: got 'optimizer', expected none or all",
    ),
    "generation without a language-model head": (
        GOOD,
        "models.actor.head: got 'scalar'",
        replace(GRAPH, models=(model("actor", "scalar"), *GRAPH.models[1:])),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_plan_is_refused_in_one_line(case):
    plan, says, *graph = BAD[case]
    with pytest.raises(InvalidInput) as error:
        check_plan(plan, *(graph or [GRAPH]), LEASE)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_lease_outside_the_cluster_is_refused():
    with pytest.raises(InvalidInput, match="mesh: got 'n5:0'"):
        check_plan(GOOD, GRAPH, DeviceMesh(5, 1, 0, 1))


def test_replicas_may_share_experts():
    plan = placed(placed(placed(GOOD, "ref_inference", ep=2), "actor_generate", ep=4), "actor_train_step", ep=4)
    assert check_plan(plan, MIXTURES, LEASE) is plan


def test_a_good_plan_comes_back():
    assert check_plan(GOOD, GRAPH, LEASE) is GOOD


def test_stages_and_vocabulary_need_not_divide():
    """30 layers over 4 stages and 511 tokens over tp 2: stages differ by one layer, the vocabulary is padded."""
    plan = placed(placed(GOOD, "ref_inference", dp=1, pp=4), "critic_inference", dp=2, tp=2)
    graph = reshaped(num_layers=30, vocab_size=511)
    assert check_plan(plan, graph, LEASE) is plan


@pytest.mark.parametrize("num_rows", [30, 7, 2])
def test_rows_need_not_divide(num_rows):
    """30 rows, or 7, over four replicas and two mini-batches; of 2 rows two replicas have none."""
    graph = with_rows(GRAPH, num_rows)
    assert check_plan(GOOD, graph, LEASE) is GOOD


def test_micro_batches_need_not_divide_either():
    plan = placed(GOOD, "actor_train_step", micro_batches=3)
    assert check_plan(plan, GRAPH, LEASE) is plan


def test_a_role_may_infer_and_train_differently_on_the_same_mesh():
    """They are two copies of the weights."""
    plan = placed(GOOD, "critic_inference", dp=2, tp=2)
    assert check_plan(plan, GRAPH, LEASE) is plan


def test_an_engine_without_adapters_refuses_a_model_with_an_adapter(monkeypatch):
    """A plan that names it is refused in a line, and presets name another that can."""
    monkeypatch.setitem(engine_traits._TRAITS, "vllm", replace(engine_traits.TRAITS["vllm"], adapts=False))
    actor = replace(GRAPH.model("actor"), adapter=AdapterSpec(4, 8.0, ("q_proj",)))
    graph = replace(GRAPH, models=tuple(actor if each.role == "actor" else each for each in GRAPH.models))
    assert GOOD["actor_generate"].engine == "vllm"
    with pytest.raises(InvalidInput) as refused:
        check_plan(GOOD, graph, LEASE)
    assert str(refused.value) == (
        "plan.calls.actor_generate.engine: got 'vllm', expected megatron for actor (/models/actor): it has an adapter, "
        "which vllm does not compute here"
    )
    found = preset("flattening", graph, CLUSTER, LEASE)
    assert {call.name: found[call.name].engine for call in graph if call.role == "actor"} == {
        "actor_generate": "megatron",
        "actor_train_step": "megatron",
    }


def test_on_cuda_one_vllm_instance_leaves_a_device():
    """vLLM's allocator serves one instance of a process; on other devices, and on CPU, each may."""
    cluster, second = ClusterShape("four", 1, 4, 8 * GIB), "actor_generate_baseline"
    plan = preset("flattening", remax(), cluster, cluster.whole)
    asleep = placed(placed(plan, "actor_generate", offload="all"), second, dp=2, tp=2, offload="all")
    with pytest.raises(InvalidInput, match=r"baseline.offload: got 'all', expected none: on cuda only a single"):
        check_plan(asleep, remax(), cluster.whole)
    on_cpu = replace(asleep, cluster=replace(cluster, backend="cpu"))
    assert check_plan(on_cpu, remax(), cluster.whole) is on_cpu
    apart = placed(placed(asleep, second, mesh="n0:0-1", dp=1), "actor_generate", mesh="n0:2-3", dp=2)
    assert check_plan(apart, remax(), cluster.whole) is apart


def adapted(graph, rank=8):
    """The graph with an adapter on the actor."""
    adapter = AdapterSpec(rank, 16.0, ("q_proj",))
    models = [replace(each, adapter=adapter) if each.role == "actor" else each for each in graph.models]
    return replace(graph, models=tuple(models))


def test_vllm_with_an_adapter_stays_on_its_device_on_cuda():
    """No GPU has shown yet that the adapter comes back."""
    asleep = generate(offload="all")
    assert check_plan(asleep, GRAPH, LEASE) is asleep
    expected = r"actor_generate.offload: got 'all', expected no offload: no GPU has shown yet"
    with pytest.raises(InvalidInput, match=expected):
        check_plan(asleep, adapted(GRAPH), LEASE)
    on_cpu = placed(replace(asleep, cluster=replace(CLUSTER, backend="cpu")), "actor_generate", dp=2, tp=2)
    assert check_plan(on_cpu, adapted(GRAPH), LEASE) is on_cpu


def test_an_adapter_for_which_vllm_has_no_room_is_megatrons_to_generate():
    graph, call = adapted(GRAPH, rank=600), GRAPH.call("actor_generate")
    assert able_engines(call, graph, "cpu") == ["megatron"]
    assert able_engines(call, adapted(GRAPH), "cpu") == list(engines_of("generate"))
    line = r"engine: got 'vllm', expected megatron for actor .*: its adapter has rank 600, and vllm has room for 512"
    with pytest.raises(InvalidInput, match=line):
        check_plan(placed(GOOD, "actor_generate", engine="vllm"), graph, LEASE)


def test_words_of_activations_that_an_engine_does_not_know_are_refused(monkeypatch):
    plain = EngineTraits(serves=("train_step",), micro_batches=True, pipelines=True)
    monkeypatch.setitem(engine_traits._TRAITS, "plain", plain)
    with pytest.raises(InvalidInput, match="actor_train_step.recompute: 'all' is not used: plain recomputes no layers"):
        check_plan(placed(GOOD, "actor_train_step", engine="plain", recompute="all"), GRAPH, LEASE)
    divided = placed(GOOD, "actor_train_step", engine="plain", dp=2, tp=2, sequence_parallel=True)
    with pytest.raises(InvalidInput, match="sequence_parallel: True is not used: plain divides no sequences"):
        check_plan(divided, GRAPH, LEASE)


def test_parts_of_whole_groups_are_accepted():
    grouped = replace(GRAPH, calls=tuple(replace(c, rows=replace(c.rows, samples=8)) for c in GRAPH))
    assert check_plan(generate(parts=4), grouped, LEASE)
    with pytest.raises(InvalidInput, match="parts: got 8, expected at most 4, the step's groups of rows"):
        check_plan(generate(parts=8), grouped, LEASE)


def test_parts_of_chosen_rows_are_refused():
    """What a choice keeps is known only once it has seen all rows."""
    rows = GRAPH.call("ref_inference").rows
    kept = replace(rows, name="informative", samples=1, parent=rows, choice=Choice(32, 1, at_most=16, expected=16))
    call = replace(GRAPH.call("ref_inference"), rows=kept)
    (wrong,) = violations(call, ref(parts=4)["ref_inference"], GRAPH, "cuda")
    reason = "its rows are chosen, by informative, which needs all rows at once"
    assert str(wrong).startswith(f"plan.calls.ref_inference.parts: 4 is not used: {reason}")


@pytest.mark.parametrize("recompute", [1, 2, "all"])
def test_layers_of_a_train_step_may_be_recomputed(recompute):
    """Of a stage as many as it has; a smaller last stage recomputes all of its own."""
    assert check_plan(placed(GOOD, "critic_train_step", pp=2, dp=2, recompute=recompute), GRAPH, LEASE)
