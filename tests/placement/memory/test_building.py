"""Bytes while models are built: worked out by hand, and in the certificate of GPUs alone."""

from dataclasses import replace

from prefect_rlhf.placement.cost.call_bytes import call_bytes, trial_bytes
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.mesh import ClusterShape, Device
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.memory.building import Building
from prefect_rlhf.placement.memory.certificate import certify_plan
from prefect_rlhf.placement.memory.holdings import ResidentBytes
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.plan import instances
from prefect_rlhf.placement.planner.preset_plan import preset
from tests.support.strategies import GIB, dpo, placed, ppo

EIGHT = ClusterShape("eight", 1, 8, 80 * GIB)
KEPT = {"actor": {"weights": 10, "gradients": 20, "optimizer": 5}, "ref": {"weights": 7}}


def moments(plan, graph, kept=KEPT, stays=()):
    """The bytes at each moment of the builds on the first device, by its name without the instance's mesh."""
    held = [
        ResidentBytes(Device(0, 0), instance, what, size)
        for instance in instances(graph, plan)
        for what, size in kept[instance.role].items()
    ]
    found = Building(graph, plan, Workload.fixed(32, 32), "cuda", stays).moments(held)
    return {
        (name.split()[1], name.rpartition(": ")[2]): sum(share.num_bytes for share in shares) for name, shares in found
    }


def test_weights_exist_twice_while_they_move_into_their_buffer():
    """The reference is built first, and stays. The optimizer is made after the move."""
    graph = dpo()
    found = moments(preset("flattening", graph, EIGHT, EIGHT.whole), graph)
    assert found == {
        ("ref.megatron", "all that it keeps"): 7,
        ("actor.megatron", "all that it keeps"): 7 + 35,
        ("actor.megatron", "weights twice"): 7 + 2 * 10 + 20,
    }


def test_a_move_builds_while_other_copies_stay():
    """The actor stays, so the reference is built beside all of it."""
    graph = dpo()
    plan = preset("flattening", graph, EIGHT, EIGHT.whole)
    stays = [instance for instance in instances(graph, plan) if instance.role == "actor"]
    found = moments(plan, graph, stays=stays)
    assert found["actor.megatron", "weights twice"] == 2 * 10 + 20
    assert found["ref.megatron", "all that it keeps"] == 35 + 7


def test_an_offloaded_part_leaves_before_the_next_build():
    graph = dpo()
    plan = placed(preset("flattening", graph, EIGHT, EIGHT.whole), "ref_inference", offload="all")
    assert moments(plan, graph)["actor.megatron", "weights twice"] == 2 * 10 + 20


def test_vllm_tries_the_model_before_it_allocates_the_cache():
    graph = ppo()
    plan = preset("flattening", graph, EIGHT, EIGHT.whole)
    (sampler,) = [instance for instance in instances(graph, plan) if instance.engine == "vllm"]
    kept = {"weights": 10, "key-value cache": 1 << 30}
    held = [ResidentBytes(Device(0, 0), sampler, what, size) for what, size in kept.items()]
    found = {
        name.rpartition(": ")[2]: {share.what: share.num_bytes for share in shares}
        for name, shares in Building(graph, plan, Workload.fixed(32, 32), "cuda").moments(held)
    }
    assert found["all that it keeps"] == kept
    assert found["trial pass"].keys() == {"weights", "trial pass"}


def test_a_trial_has_as_many_tokens_as_a_pass_may_have_however_short_prompts_are():
    """64 rows of 8 + 1,016 tokens: a generate's first pass has 512 tokens, the trial 8,192."""
    sizes, work = ModelSizes.of_shape(known_shape("llama-7b")), CallWork("generate", 64, Workload.fixed(8, 1016))
    run = call_bytes(work, Execution(Strategy()), sizes, "vllm")
    trial = trial_bytes(64, work.workload, run.kv_cache, sizes, 1)
    logits = 64 * sizes.vocab * 3 * 4
    assert trial == run.working * 8192 // 512 + logits


def test_the_certificate_of_gpus_counts_builds():
    """Over eight replicas the optimizer's states are smaller than a second copy of the weights, and rows are tiny."""
    graph = dpo()
    large = replace(known_shape("llama-7b"), num_layers=4)
    graph = replace(graph, models=tuple(replace(model, shape=large) for model in graph.models))
    strategy = {"dp": 8, "tp": 1, "pp": 1, "micro_batches": 1}
    plan = preset("flattening", graph, EIGHT, EIGHT.whole)
    for call in ("ref_inference", "actor_train_step"):
        plan = placed(plan, call, **strategy)
    built, on_cpu = (certify_plan(plan, graph, Workload.fixed(2, 2), kind).fullest for kind in ("cuda", "cpu"))
    assert built.node.startswith("build actor.megatron") and built.node.endswith("weights twice")
    assert not on_cpu.node.startswith("build")
    of_actor = {share.what: share.num_bytes for share in built.shares if share.passing}
    assert of_actor["weights in buffers"] == of_actor["weights"] == of_actor["gradients"] // 2
