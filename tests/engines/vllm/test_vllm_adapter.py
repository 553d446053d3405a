"""An adapter in vLLM: written in place, multiplied by its scale, and equal to peft on transformers."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from peft import LoraConfig, get_peft_model
from vllm.config.lora import MaxLoRARanks
from vllm.lora.layers import LoRAMapping
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm_cases import Oracle, build_command, check_sampling, make_folder, make_prompts
from vllm_world import run_world

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.engines.files.export import export
from prefect_rlhf.engines.files.initial_adapter import initial_values
from prefect_rlhf.engines.rank.loaded_model import LoadedModel
from prefect_rlhf.engines.vllm import settings
from prefect_rlhf.engines.vllm.adapter import NUMBER, add_products, slots
from prefect_rlhf.engines.vllm.engine import VllmEngine
from prefect_rlhf.errors.errors import EngineFailed, InvalidInput, StaleWeights
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import parts
from tests.support.by_device import instance_holdings
from tests.support.strategies import call

pytestmark = pytest.mark.slow
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTER = AdapterSpec(4, 6.0, ALL)  # in a slot of rank 8
SOME = AdapterSpec(16, 8.0, ("v_proj", "up_proj", "o_proj"), rslora=True)  # fused with matrices that have none
PROMPTS = make_prompts(8)
SEEDS = list(range(8))
GREEDY = SamplingSettings(10, temperature=0.0, stop_at_eos=False)
SAMPLED = SamplingSettings(12, stop_at_eos=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("models") / "base", 1, tied=True)


def values(name, shape):
    """A trained adapter's: neither A nor B is zero."""
    return initial_values(name.replace("lora_B", "lora_A"), shape, 7)


def shapes(command):
    return {parameter.name: parameter.shape for parameter in parts(command.model)["adapter"]}


def write(engine, command):
    """Write a trained adapter through the views, as a reallocation does."""
    for name, shape in shapes(command).items():
        shard = engine.weights()[name]
        shard.view.copy_(values(name, shape)[tuple(slice(*span) for span in shard.region)])
    engine.weights_written()


def by_peft(folder, adapter):
    """Transformers with the same adapter, by peft."""
    oracle = Oracle(folder)
    options = {"lora_alpha": adapter.alpha, "use_rslora": adapter.rslora, "target_modules": list(adapter.matrices)}
    get_peft_model(oracle.model, LoraConfig(r=adapter.rank, **options))  # in place
    with torch.no_grad():
        for name, parameter in oracle.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(values(name.replace(".default", ""), tuple(parameter.shape)))
    return oracle


@pytest.fixture(scope="module")
def command(folder):
    return build_command(folder, adapter=ADAPTER)


@pytest.fixture(scope="module")
def fresh(command):
    """An engine as it was built, and its greedy tokens then."""
    engine = VllmEngine(command, 0)
    return engine, engine.generate(PROMPTS, GREEDY, SEEDS)


@pytest.fixture(scope="module")
def engine(fresh, command):
    write(fresh[0], command)
    return fresh[0]


def test_a_new_adapter_is_drawn_as_every_engine_draws_it_and_changes_no_token(folder, command, fresh):
    other = build_command(folder, adapter=SOME)
    held = VllmEngine(replace(other, seed=3), 0).weights()
    for name, shape in shapes(other).items():
        assert torch.equal(held[name].view, initial_values(name, shape, 3)), name
    oracle = Oracle(folder)
    assert fresh[1].tokens == [oracle.greedy(prompt, 10) for prompt in PROMPTS]


def test_tokens_and_logprobs_match_peft_on_transformers(folder, fresh, engine):
    oracle = by_peft(folder, ADAPTER)
    greedy = engine.generate(PROMPTS, GREEDY, SEEDS)
    assert greedy.tokens == [oracle.greedy(prompt, 10) for prompt in PROMPTS]
    assert greedy.tokens != fresh[1].tokens
    check_sampling(oracle, engine.generate(PROMPTS, SAMPLED, SEEDS), PROMPTS, 1.0, 1.0)


def test_partly_adapted_fused_matrices_and_rslora_match_peft(folder):
    command = build_command(folder, adapter=SOME)
    engine, oracle = VllmEngine(command, 0), by_peft(folder, SOME)
    write(engine, command)
    check_sampling(oracle, engine.generate(PROMPTS, SAMPLED, SEEDS), PROMPTS, 1.0, 1.0)
    assert engine.device_bytes() <= counted(command) <= 1.001 * engine.device_bytes()
    engine.close()


def test_written_adapter_weights_match_bit_for_bit(command, engine):
    """The scale is not in B, and rows beyond the rank are zero."""
    engine.generate(PROMPTS[:1], GREEDY, SEEDS[:1])
    for name, shape in shapes(command).items():
        assert torch.equal(engine.weights()[name].view, values(name, shape)), name
    held = sum(int(slot.count_nonzero()) for slot in slots(engine._runner.get_model()))
    assert held == sum(int(values(name, shape).count_nonzero()) for name, shape in shapes(command).items())
    ranks = {min(slot.shape[2:]) for slot in slots(engine._runner.get_model())}
    assert ranks == {8} != {ADAPTER.rank}


def test_weights_of_the_base_have_their_names(folder, engine):
    plain = VllmEngine(build_command(folder), 0)
    for name, shard in plain.weights().items():
        assert torch.equal(engine.weights()[name].view, shard.view), name
        assert engine.weights()[name].region == shard.region
    plain.close()


def counted(command):
    """The bytes that a certificate has of an engine."""
    generate = replace(call("a_call", "generate", "actor", {}), num_rows=command.max_rows)
    holdings = instance_holdings(command.instance, (generate,), command.model, command.max_sequence_length, "cpu")
    return sum(holding.num_bytes for holding in holdings)


def test_a_certificate_counts_the_slots(command, engine):
    engine.generate(PROMPTS[:1], GREEDY, SEEDS[:1])  # packs the base
    assert engine.device_bytes() <= counted(command) <= 1.001 * engine.device_bytes()


def test_an_adapter_comes_back_from_an_offload(engine):
    before, made = engine.device_bytes(), engine.generate(PROMPTS, SAMPLED, SEEDS)
    assert engine.offload() > 0
    assert engine.device_bytes() == 0
    assert all(slot.untyped_storage().nbytes() == 0 for slot in slots(engine._runner.get_model()))
    engine.reload()
    assert engine.device_bytes() == before
    assert engine.generate(PROMPTS, SAMPLED, SEEDS) == made


@pytest.mark.parametrize("forgets", ["removes", "writes"])
def test_a_slot_that_was_cleared_or_written_by_others_stops_the_run_with_the_name_of_the_call(command, engine, forgets):
    write(engine, command)
    model = LoadedModel(engine, command)
    model.label(3, whole=True)
    model.require(3, "actor_generate · step 4")
    if forgets == "removes":  # as for a request with another adapter
        manager = engine._runner.lora_manager._adapter_manager
        manager.modules["model.layers.0.mlp.down_proj"].reset_lora(0)
    else:
        engine.weights()["model.layers.3.self_attn.v_proj.lora_B.weight"].view.mul_(1.5)
    line = (
        r"actor_generate · step 4: actor.vllm.* is labelled v3, but model.layers.\d.*lora_\w.weight was written since"
    )
    with pytest.raises(StaleWeights, match=line):
        model.require(3, "actor_generate · step 4")
    write(engine, command)


def test_vllm_keeps_the_slot_and_gives_it_to_no_other_adapter(engine):
    engine.generate(PROMPTS, GREEDY, SEEDS)
    manager = engine._runner.lora_manager._adapter_manager
    assert manager.lora_index_to_id == [NUMBER]
    with pytest.raises(RuntimeError, match="pinned"):
        manager.activate_adapter(NUMBER + 1)


def test_a_nonzero_slot_next_to_an_adapter_is_an_error(folder):
    command = build_command(folder, adapter=SOME)
    engine = VllmEngine(command, 0)
    engine.generate(PROMPTS[:1], GREEDY, SEEDS[:1])
    engine._runner.get_model().model.layers[1].self_attn.qkv_proj.lora_b_stacked[0][0, 0, 3, 2] = 1
    line = r"vLLM computes from model.layers.1.self_attn.qkv_proj.lora_b_stacked, a copy of its own, expected"
    with pytest.raises(EngineFailed, match=line):
        engine.generate(PROMPTS[:1], GREEDY, SEEDS[:1])
    engine.close()


def test_an_export_is_what_vllms_own_loader_loads(folder, command, engine, tmp_path):
    write(engine, command)
    export(engine, command.model, command.layout, tmp_path / "actor", folder, 0)
    request = LoRARequest(lora_name="theirs", lora_int_id=2, lora_path=str(tmp_path / "actor"))
    loaded = engine._runner.lora_manager._load_adapter(request).loras
    matrices = {name.rpartition(".lora_")[0] for name in shapes(command)}
    assert loaded.keys() == matrices
    for matrix, layer in loaded.items():
        a, b = (engine.weights()[f"{matrix}.lora_{half}.weight"].view for half in "AB")
        torch.testing.assert_close(layer.lora_b @ layer.lora_a * layer.scaling, b @ a * ADAPTER.scale)


def test_our_product_on_cpu_is_vllms():
    torch.manual_seed(0)
    a = [torch.randn(1, 1, 8, 32) for _ in range(3)]
    b = [torch.randn(1, 1, width, 8) for width in (64, 16, 16)]
    for slot in a:
        slot[0, 0, 5:] = 0
    x, y = torch.randn(11, 32), torch.randn(11, 96)
    wrapper = PunicaWrapperCPU(16, 4, "cpu")
    wrapper.update_metadata(LoRAMapping((NUMBER,) * 11, (NUMBER,) * 11, is_prefill=True), [NUMBER], 2, 100)
    expected = y.clone()
    wrapper.add_lora_linear(expected, x, tuple(a), tuple(b), 1.5, (64, 16, 16))
    add_products(5, y, x, a, b, 1.5, (64, 16, 16))
    torch.testing.assert_close(y, expected)


def test_slots_have_the_ranks_that_vllm_has():
    assert TRAITS["vllm"].adapter_ranks == tuple(sorted(get_args(MaxLoRARanks)))


def test_what_vllm_cannot_do_with_an_adapter_is_refused(folder, command, monkeypatch):
    with pytest.raises(InvalidInput, match="adapter.rank: got 600, expected at most 512 with engine vllm"):
        settings.adapter_arguments(AdapterSpec(600, 6.0, ALL))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        InvalidInput, match=r"actor.vllm.*: offload: got 'all', expected no offload with an adapter on cuda"
    ):
        settings.check_command(replace(command, is_offloaded=True))


def on_rank(rank, folder):
    """Tokens and log-probabilities of an engine over two ranks."""
    command = build_command(folder, ranks=(0, 1), tp=2, adapter=ADAPTER)
    engine = VllmEngine(command, rank)
    write(engine, command)
    return engine.generate(PROMPTS, SAMPLED, SEEDS)


@pytest.mark.all
def test_an_adapter_over_two_ranks_makes_the_tokens_of_peft(folder, engine, command):
    write(engine, command)
    alone = engine.generate(PROMPTS, SAMPLED, SEEDS)
    for made in run_world(2, on_rank, folder):
        assert made.tokens == alone.tokens
        check_sampling(by_peft(folder, ADAPTER), made, PROMPTS, 1.0, 1.0)
