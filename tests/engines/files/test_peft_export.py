"""Trained adapters as folders: what `peft` loads of them, and the merged model."""

import json
import math
from dataclasses import replace
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefect_rlhf.engines.files.export import write_trained
from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.files.initial_adapter import initial_values
from prefect_rlhf.engines.files.peft_export import trained_parameters
from prefect_rlhf.engines.files.peft_folder import open_adapter, read_adapter
from prefect_rlhf.files.model_folder import MERGED
from prefect_rlhf.placement.models.adapter import AdapterSpec
from tests.tasks.small_tokenizer import save_small_tokenizer

ADAPTER = AdapterSpec(4, 6.0, ("q_proj", "k_proj", "down_proj"), rslora=True)
TOKENS = torch.tensor([[5, 9, 17, 33, 4, 8]])


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = cases.make_folder(tmp_path_factory.mktemp("models") / "base", layers=2, hidden=64)
    save_small_tokenizer(Path(folder))
    return folder


def adapted(base, head="lm", dtype="float32", **more):
    spec = read_model_spec("actor", base, head, dtype=dtype, new_head=True)
    return replace(spec, **{"adapter": ADAPTER, **more})


def trained(spec):
    """Values of a trained adapter, neither A nor B zero, and of a scalar head."""
    shapes = {one.name: one.shape for one in trained_parameters(spec)}
    made = {name: initial_values(name.replace("lora_B", "lora_A"), shape, 5) for name, shape in shapes.items()}
    return {name: values.to(getattr(torch, spec.dtype)) for name, values in made.items()}


def product(base, tensors, name):
    """A matrix of the base with the adapter's product added, in float64."""
    whole = load_file(Path(base) / "model.safetensors")[f"{name}.weight"].double()
    a, b = (tensors[f"{name}.lora_{half}.weight"].double() for half in "AB")
    return whole + 6 / math.sqrt(4) * b @ a


def test_peft_loads_an_export_and_computes_the_same(base, tmp_path):
    spec = adapted(base)
    tensors = trained(spec)
    write_trained(tmp_path / "actor", spec, tensors.items(), base)
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "actor", dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        for layer in (0, 1):
            for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
                whole = f"model.layers.{layer}.{name}"
                plain.get_submodule(whole).weight.copy_(product(base, tensors, whole))
        torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "actor").get_vocab() == AutoTokenizer.from_pretrained(base).get_vocab()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merged_folder_is_pefts_merge_rounded_once(base, tmp_path, dtype):
    spec = adapted(base, dtype=dtype)
    write_trained(tmp_path / "actor", spec, trained(spec).items(), base, merge=True)
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "actor", dtype=torch.float32)
    expected = loaded.merge_and_unload().state_dict()
    found = load_file(tmp_path / f"actor{MERGED}" / "model.safetensors")
    for name, values in found.items():
        torch.testing.assert_close(values.float(), expected[name].to(values.dtype).float(), rtol=1e-6, atol=1e-7)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / f"actor{MERGED}", dtype="auto").dtype == values.dtype
    assert read_model_spec("actor", tmp_path / f"actor{MERGED}", "lm").shape == spec.shape
    assert not (tmp_path / f"actor{MERGED}" / "adapter_config.json").exists()


def test_a_scalar_head_is_a_module_that_peft_saves_whole(base, tmp_path):
    spec = adapted(base, "scalar")
    tensors = trained(spec)
    write_trained(tmp_path / "reward", spec, tensors.items(), base)
    model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "reward", num_labels=1)
    assert torch.equal(model.base_model.model.score.modules_to_save["default"].weight, tensors["score.weight"])


def test_a_second_scalar_head_is_exported_to_a_file_that_peft_ignores(base, tmp_path):
    spec = adapted(base, "lm+scalar")
    tensors = trained(spec)
    write_trained(tmp_path / "both", spec, tensors.items(), base)
    assert json.loads((tmp_path / "both" / "adapter_config.json").read_text())["modules_to_save"] is None
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "both")
    with open_adapter(tmp_path / "both", "actor.adapter.path") as stored:
        assert torch.equal(stored.read("score.weight", ((0, 1), (0, 64))), tensors["score.weight"])


@pytest.mark.parametrize("head", ["lm", "scalar", "lm+scalar"])
def test_an_export_is_an_adapter_to_begin_with(base, tmp_path, head):
    spec, said = adapted(base, head), []
    write_trained(tmp_path / "actor", spec, trained(spec).items(), base)
    found = read_adapter(replace(spec, adapter=None), tmp_path / "actor", {}, said.append)
    assert found == replace(ADAPTER, path=str(tmp_path / "actor"))
    assert said == []


OF_PEFT_0_4 = {
    *("auto_mapping", "base_model_name_or_path", "bias", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "modules_to_save", "peft_type", "r"),
    *("revision", "target_modules", "task_type"),
}
"""Every key of its adapter_config.json. Versions 0.7 to 0.10 fail at a key that a later version added."""


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapters_settings_have_only_keys_that_every_peft_reads_unless_they_are_needed(base, tmp_path, rslora):
    """0.4, 0.6, 0.7 and 0.8 were tried by hand."""
    spec = adapted(base, adapter=replace(ADAPTER, rslora=rslora))
    write_trained(tmp_path / "actor", spec, trained(spec).items(), base)
    keys = json.loads((tmp_path / "actor" / "adapter_config.json").read_text()).keys()
    assert keys - OF_PEFT_0_4 == ({"use_rslora"} if rslora else set())


def test_an_export_has_the_models_own_chat_template_and_the_name_of_its_base(base, tmp_path):
    spec = adapted(base, chat_template="{{ messages }} of mine")
    write_trained(tmp_path / "actor", spec, trained(spec).items(), base)
    assert (tmp_path / "actor" / "chat_template.jinja").read_text() == "{{ messages }} of mine"
    config = json.loads((tmp_path / "actor" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 6, True)
    of_hub = replace(spec, path=f"/hub/models--acme--tiny/snapshots/{'a' * 40}")
    write_trained(tmp_path / "hub", of_hub, trained(spec).items(), base)
    config = json.loads((tmp_path / "hub" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("acme/tiny", "a" * 40)  # AutoPeft loads both
