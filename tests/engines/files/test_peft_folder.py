"""Adapters that the `peft` package wrote: what is read of a folder, and one line for each folder of another kind."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from prefect_rlhf.engines.files.huggingface import read_model_spec
from prefect_rlhf.engines.files.peft_folder import PREFIX, open_adapter, read_adapter
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.weights import parts

MATRICES = ("q_proj", "v_proj", "down_proj")


def save_adapter(base, folder, kind=AutoModelForCausalLM, **options):
    """Write the folder of an adapter on a base model, with random A and B."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": list(MATRICES)} | options
    of_kind = {"num_labels": 1} if kind is AutoModelForSequenceClassification else {}
    model = get_peft_model(kind.from_pretrained(base, **of_kind), LoraConfig(**settings))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "base", layers=2, hidden=64)


@pytest.fixture(scope="module")
def saved(base, tmp_path_factory):
    return save_adapter(base, tmp_path_factory.mktemp("adapters") / "sft")


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def read(base, folder, said=None, head="lm", **stated):
    spec = read_model_spec("actor", base, head, dtype="float32", new_head=True)
    return read_adapter(spec, folder, stated, say=[].append if said is None else said.append)


def edit(folder, **changes):
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))


def change(folder, **tensors):
    """Replace or add tensors; None removes one. Dots are written as __."""
    file = folder / "adapter_model.safetensors"
    changed = load_file(file) | {PREFIX + name.replace("__", "."): values for name, values in tensors.items()}
    save_file({name: values for name, values in changed.items() if values is not None}, file)


def test_rank_alpha_and_matrices_are_read_from_the_folder(base, saved):
    said = []
    assert read(base, saved, said) == AdapterSpec(4, 6.0, MATRICES, False, str(saved))
    assert said == []


def test_rslora_is_read_and_changes_the_scale(base, tmp_path):
    found = read(base, save_adapter(base, tmp_path / "made", use_rslora=True))
    assert found.rslora
    assert found.scale == 3


@pytest.mark.parametrize("target", ["all-linear", r".*\.(q_proj|v_proj)"])
def test_the_tensors_say_which_matrices_are_adapted_however_they_were_named(base, tmp_path, target):
    found = read(base, save_adapter(base, tmp_path / "made", target_modules=target))
    both = ("q_proj", "v_proj")
    every = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert set(found.matrices) == set(both if "v_proj" in target else every)


def test_tensors_have_our_names_and_the_values_that_peft_wrote(base, saved):
    spec = read_model_spec("actor", base, "lm", dtype="float32")
    stored = load_file(saved / "adapter_model.safetensors")
    adapted = parts(replace(spec, adapter=read(base, saved)))["adapter"]
    with open_adapter(saved, "actor.adapter.path") as tensors:
        for parameter in adapted:
            whole = tensors.read(parameter.name, tuple((0, size) for size in parameter.shape))
            assert torch.equal(whole, stored[PREFIX + parameter.name])
    assert len(adapted) == len(stored)


def test_values_that_were_stated_too_have_to_be_the_folders(base, saved):
    assert read(base, saved, rank=4, alpha=6.0, matrices=("down_proj", "v_proj", "q_proj")).rank == 4
    with pytest.raises(InvalidInput, match=r"actor.adapter.rank: got 8, expected 4, as in .*sft, or no value"):
        read(base, saved, rank=8)
    with pytest.raises(InvalidInput, match="actor.adapter.matrices: .* expected q_proj, v_proj, down_proj, as in"):
        read(base, saved, matrices=("q_proj",))


def test_dropout_is_left_out_and_said(base, tmp_path):
    said = []
    read(base, save_adapter(base, tmp_path / "made", lora_dropout=0.1), said)
    assert said == ["actor.adapter.path: the adapter was trained with dropout 0.1; here it has no dropout"]


def test_an_adapters_scalar_head_is_used_by_roles_that_have_one(base, tmp_path):
    made = save_adapter(base, tmp_path / "made", AutoModelForSequenceClassification, task_type="SEQ_CLS")
    assert read(base, made, head="scalar").rank == 4
    with pytest.raises(InvalidInput, match=r"modules_to_save: got \['classifier', 'score'\], expected no module: only"):
        read(base, made)


def test_a_base_of_another_name_is_reported_and_a_local_base_compared(base, folder, tmp_path):
    said = []
    edit(folder, base_model_name_or_path="Qwen/Qwen2.5-0.5B")
    read(base, folder, said)
    assert said == [f"actor.adapter.path: trained on Qwen/Qwen2.5-0.5B; only shapes show that {base} is the same model"]
    edit(folder, base_model_name_or_path=str(shutil.copytree(base, tmp_path / "moved")))
    read(base, folder, said)
    assert len(said) == 1


def test_a_base_at_another_commit_is_reported(base, folder, tmp_path):
    """`revision` of a PEFT folder is its base's; a branch may have moved, so only commits are compared."""
    place, said = tmp_path / "models--acme--tiny" / "snapshots" / ("a" * 40), []
    place.parent.mkdir(parents=True)
    shutil.copytree(base, place)
    for revision in (None, "main", "a" * 40):
        edit(folder, base_model_name_or_path="acme/tiny", revision=revision)
        read(place, folder, said)
    assert said == []
    edit(folder, revision="b" * 40)
    read(place, folder, said)
    assert said == [f"actor.adapter.path: trained on acme/tiny@{'b' * 40}; actor.path is at commit {'a' * 40}"]


def test_another_chat_template_than_the_bases_is_reported(base, folder, tmp_path):
    """TRL and LLaMA-Factory save the template that they trained with beside the adapter."""
    model, said = shutil.copytree(base, tmp_path / "base"), []
    (folder / "chat_template.jinja").write_text("{{ messages }} of the adapter")
    read(model, folder, said)
    assert said[0].endswith(
        f"another chat template than {model}, whose template is used; if the adapter was trained with its own, "
        f"set actor.chat_template={folder}/chat_template.jinja"
    )
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }} of the adapter\n"}))
    read(model, folder, said)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    read(model, folder, said, head="scalar")
    spec = replace(read_model_spec("actor", model, "lm"), chat_template="stated")
    read_adapter(spec, folder, {}, say=said.append)
    assert len(said) == 1


def other_base(folder):
    other = folder.parent / "other"
    shutil.copytree(json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"], other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] += 1
    save_file(tensors, other / "model.safetensors")
    edit(folder, base_model_name_or_path=str(other))


def test_a_head_of_several_labels_is_refused(base, tmp_path):
    """peft's classifiers have two labels by default; a reward or a value is one number."""
    options = {"num_labels": 2, "dtype": torch.float32}
    model = get_peft_model(
        AutoModelForSequenceClassification.from_pretrained(base, **options),
        LoraConfig(r=4, target_modules=["q_proj"], task_type="SEQ_CLS"),
    )
    model.save_pretrained(tmp_path / "made")
    with pytest.raises(
        InvalidInput, match=r"score.weight of shape \(2, 64\)', expected shape \(1, 64\), a head of one n"
    ):
        read(base, tmp_path / "made", head="scalar")


A = "model__layers__0__self_attn__q_proj__lora_A__weight"
REFUSED = {
    "no folder": (shutil.rmtree, r"actor.adapter.path: got .*copy', expected a folder that peft wrote, with adapter_c"),
    "no tensors": (
        lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"),
        "no file adapter_model.safetensors in .*; torch's own file \\(.bin\\) may run code",
    ),
    "not JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "a JSON object in adapter_config.json"),
    "another kind": (lambda f: edit(f, peft_type="IA3"), "adapter_config.json: peft_type: got 'IA3', expected LORA"),
    "DoRA": (lambda f: edit(f, use_dora=True), "use_dora: got True, expected false: DoRA is not computed here"),
    "a trained embedding": (
        lambda f: edit(f, modules_to_save=["embed_tokens"]),
        r"modules_to_save: got \['embed_tokens'\], expected no module: only the adapter is trained",
    ),
    "biases": (lambda f: edit(f, bias="lora_only"), "bias: got 'lora_only', expected 'none': only the matrices"),
    "PiSSA": (lambda f: edit(f, init_lora_weights="pissa"), "init_lora_weights: got 'pissa', expected a plain adapter"),
    "LoRA-GA": (
        lambda f: edit(f, init_lora_weights="lora_ga"),
        "init_lora_weights: got 'lora_ga', expected a plain adapter; this kind changes its base",
    ),
    "ranks by name": (lambda f: edit(f, rank_pattern={"q_proj": 8}), "rank_pattern: .* expected no pattern"),
    "some layers": (lambda f: edit(f, layers_to_transform=[1]), r"layers_to_transform: got \[1\], expected null"),
    "a later kind": (lambda f: edit(f, kasa_config={"beta": 1}), "kasa_config: got .* expected null or false: only"),
    "rank": (lambda f: edit(f, r="4"), "adapter_config.json: r: got '4', expected a whole number above 0"),
    "another rank": (lambda f: edit(f, r=8), r"lora_A.weight of shape \(4, 64\)', expected shape \(8, 64\), as"),
    "alpha": (lambda f: edit(f, lora_alpha=0), "lora_alpha: got 0, expected a number above 0"),
    "rslora": (lambda f: edit(f, use_rslora="yes"), "use_rslora: got 'yes', expected true or false"),
    "shape": (lambda f: change(f, **{A: torch.ones(4, 8)}), r"of shape \(4, 8\)', expected shape \(4, 64\)"),
    "missing": (lambda f: change(f, **{A: None}), "no tensor .*q_proj.lora_A.weight', expected a folder with the same"),
    "output": (
        lambda f: change(f, lm_head__lora_A__weight=torch.ones(4, 64)),
        "tensor base_model.model.lm_head.lora_A.weight', expected only A and B of q_proj, k_proj, v_proj, o_proj",
    ),
    "more layers": (
        lambda f: change(f, **{A.replace("__0__", "__7__"): torch.ones(4, 64)}),
        "tensor .*layers.7.*', expected 2 layers, as .*base has",
    ),
    "another base": (other_base, r"an adapter of .*other, which has another model.layers.1.mlp.down_proj.weight'"),
}


@pytest.mark.parametrize(("breaks", "line"), REFUSED.values(), ids=REFUSED)
def test_another_kind_of_folder_is_refused_in_a_line(base, folder, breaks, line):
    breaks(folder)
    with pytest.raises(InvalidInput, match=line) as refusal:
        read(base, folder)
    assert str(refusal.value).startswith("actor.adapter.path")
    assert "\n" not in str(refusal.value)


def test_a_folder_of_a_larger_model_is_refused(saved, tmp_path):
    wide = cases.make_folder(Path(tmp_path) / "wide", layers=2, hidden=128)
    with pytest.raises(InvalidInput, match=r"of shape \(4, 64\)', expected shape \(4, 128\), as .*wide"):
        read(wide, saved)
