"""Hugging Face folders in and out: every refusal names field, value and remedy; what is written, transformers loads."""

import filecmp
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import megatron_cases as cases
import pytest
import torch
import two_heads
from megatron_cases import Case
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from prefect_rlhf.engines.files.huggingface import read_model_spec, write_folder, write_tokenizer
from prefect_rlhf.engines.files.tensor_files import OpenTensors
from prefect_rlhf.engines.sampling.chats.answer_end import end_tokens
from prefect_rlhf.errors.errors import InvalidInput
from tests.engines.sampling.stand_ins import stand_in


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return cases.make_folder(tmp_path_factory.mktemp("models") / "llama", layers=2, hidden=64)


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


QWEN2 = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
BROKEN = {
    "no folder": (shutil.rmtree, "actor.path: got .*copy', expected a Hugging Face folder on this machine"),
    "no config": (lambda f: (f / "config.json").unlink(), "a Hugging Face folder; it has no config.json"),
    "an adapter": (
        lambda f: (f / "config.json").rename(f / "adapter_config.json"),
        r"it is an adapter \(LoRA\): give its base model as path, and this folder as adapter.path=.*copy",
    ),
    "GGUF files": (lambda f: (f / "config.json").rename(f / "model.gguf"), "it has GGUF files: take the folder"),
    "a folder above": (
        lambda f: shutil.move(shutil.copytree(f, f.parent / "moved"), shutil.rmtree(f) or f / "inner"),
        "it has no config.json, but holds .*copy/inner",
    ),
    "an entry of the cache": (
        lambda f: shutil.move(shutil.copytree(f, f.parent / "moved"), shutil.rmtree(f) or f / "snapshots" / "1a2b"),
        "it is an entry of the Hub's cache: .*copy/snapshots/1a2b",
    ),
    "a word of another trainer": (
        lambda f: edit(f, dtype="bf16"),
        "dtype: got 'bf16', expected a number format of torch",
    ),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "actor.config.json: got .*, expected JSON"),
    "architecture": (lambda f: edit(f, architectures=["GPT2"]), r"got 'GPT2', expected \[LlamaForCausalLM\] or"),
    "no architecture": (lambda f: edit(f, architectures=None), r"architectures: got None, expected \[LlamaForC"),
    "size": (lambda f: edit(f, num_hidden_layers=0), "num_hidden_layers: got 0, expected a whole number of 1 to 10000"),
    "activation": (lambda f: edit(f, hidden_act="gelu"), "hidden_act: got 'gelu', expected 'silu'"),
    "bias": (lambda f: edit(f, attention_bias=True), "attention_bias: got True, expected false: only"),
    "rope": (lambda f: edit(f, rope_parameters={"rope_type": "yarn"}), "rope_type: got 'yarn', expected 'default' or"),
    "rope settings": (lambda f: edit(f, rope_parameters={"rope_type": "llama3"}), "low_freq_factor: got None"),
    "part of a head": (
        lambda f: edit(f, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        r"rope_parameters.partial_rotary_factor: unknown key \(got 0.5\)",
    ),
    "dropout": (lambda f: edit(f, attention_dropout=0.1), "attention_dropout: got 0.1, expected 0.0"),
    "unknown key": (lambda f: edit(f, logit_scale=8), r"logit_scale: unknown key \(got 8\); no Llama has it"),
    "window": (
        lambda f: edit(f, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=64),
        "sliding_window: got 64, expected null, or 128, the context",
    ),
    "window of some layers": (
        lambda f: edit(f, **QWEN2, layer_types=["full_attention", "sliding_attention"]),
        "layer_types: got 'sliding_attention', expected full_attention in every layer",
    ),
    "layers that are not there": (
        lambda f: edit(f, **QWEN3, layer_types=["full_attention"]),
        r"actor.config.json.layer_types: got \['full_attention'\], expected null, or a list with the kinds of 2 layers",
    ),
    "window of Qwen": (
        lambda f: edit(f, **QWEN3, use_sliding_window=True, sliding_window=64, max_window_layers=2),
        "sliding_window: got 64, expected null, or 128, the context: no shorter window runs",
    ),
    "soft caps": (
        lambda f: edit(f, model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], final_logit_softcapping=30.0),
        "final_logit_softcapping: got 30.0, expected None",
    ),
    "quantised": (
        lambda f: edit(f, quantization_config={"quant_method": "gptq", "bits": 4}),
        "quantization_config: got .*gptq.*, expected no quantised weights; only plain weights",
    ),
    "quantised without a word": (
        lambda f: add(f, "model.norm.weight", torch.int8),
        "got 'model.norm.weight of type I8', expected a tensor of type F32, BF16 or F16",
    ),
    "an output that is not there": (
        lambda f: edit(f, tie_word_embeddings=False),
        "no tensor lm_head.weight in .*expected a checkpoint with this tensor",
    ),
    "width of a head": (lambda f: edit(f, **QWEN2), "head_dim: got 32, expected 16, hidden_size over heads"),
    "biases": (lambda f: add(f, "model.layers.0.self_attn.q_proj.bias"), "expected only parameters of Llama"),
    "experts": (lambda f: edit(f, num_local_experts=8), "num_local_experts: got 8, expected a dense model"),
    "a family that is planned only": (lambda f: edit(f, model_type="gemma2"), "expected a family that runs"),
    "two outputs": (lambda f: add(f, "lm_head.weight"), "lm_head.weight unlike model.embed_tokens.weight"),
    "vocabulary": (lambda f: edit(f, vocab_size=100), r"embed_tokens.weight of shape \(480, 64\).*shape \(100, 64\)"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "no file model.safetensors in"),
    "missing tensor": (lambda f: edit(f, num_hidden_layers=3), "no tensor model.layers.2.input_layernorm.weight"),
    "cut short": (lambda f: (f / "model.safetensors").write_bytes(b"\x10"), "this file is cut short or of another"),
    "a Git LFS pointer": (
        lambda f: (f / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:6\nsize 9\n"
        ),
        "the file, not a Git LFS pointer to it: run git lfs pull in ",
    ),
    "cut data": (lambda f: cut(f / "model.safetensors", 1000), "expected a whole file; it ends inside tensor"),
    "more data than tensors": (
        lambda f: (f / "model.safetensors").open("ab").write(b"\0" * 100),
        "actor.path: got 'model.safetensors', expected a safetensors file that its library opens .*not fully covered",
    ),
    "Mistral's own file": (
        lambda f: (f / "model.safetensors").rename(f / "consolidated.safetensors"),
        "no file model.safetensors in .*; it has consolidated.safetensors, which transformers does not read: take the",
    ),
    "shards without their index": (
        lambda f: (f / "model.safetensors").rename(f / "model-00001-of-00002.safetensors"),
        "no file model.safetensors in .*; the download is not complete: run it again",
    ),
    "attention in both directions": (
        lambda f: edit(f, is_causal=False),
        "actor.config.json.is_causal: got False, expected true, or no value: transformers and vLLM obey it",
    ),
    "header": (lambda f: (f / "model.safetensors").write_bytes(b"\x01" + b"\0" * 7 + b"{"), "its header is not JSON"),
    "index": (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "a JSON object with a weight_map"),
    "an index that is a Git LFS pointer": (
        lambda f: (f / "model.safetensors.index.json").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:6\nsize 9\n"
        ),
        "model.safetensors.index.json', expected the file, not a Git LFS pointer to it: run git lfs pull in ",
    ),
    "shard": (
        lambda f: (
            (f / "model.safetensors").unlink(),
            (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}'),
        ),
        "no file model-2.safetensors in",
    ),
}


def add(folder, name, dtype=torch.float32):
    weights = load_file(folder / "model.safetensors")
    weights[name] = (weights["model.embed_tokens.weight"] + 1).to(dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def cut(file, count):
    file.write_bytes(file.read_bytes()[:-count])


@pytest.mark.parametrize("case", BROKEN)
def test_a_folder_that_cannot_be_used_is_named(folder, case):
    """One line with field, value and what would be right, before any weight is read."""
    damage, message = BROKEN[case]
    damage(folder)
    with pytest.raises(InvalidInput, match=message) as raised:
        read_model_spec("actor", folder, "lm")
    assert "\n" not in str(raised.value)


def test_a_scalar_role_needs_a_scalar_head(folder):
    """A language model's checkpoint becomes a critic only when a new head is asked for."""
    with pytest.raises(InvalidInput, match=r"critic.path: .*scalar head \(score.weight\), or new_head: true"):
        read_model_spec("critic", folder, "scalar")
    assert read_model_spec("critic", folder, "scalar", new_head=True).new_head


def test_old_and_new_rope_settings_are_read(folder):
    """transformers 5 writes rope_parameters, older ones rope_theta."""
    assert read_model_spec("actor", folder, "lm").shape.rope_theta == 1e5
    edit(folder, rope_parameters=None, rope_theta=5e5)
    assert read_model_spec("actor", folder, "lm").shape.rope_theta == 5e5


def shards(folder, scale):
    """Write the folder's tensors, times `scale`, to two files with an index, beside the single file."""
    tensors = load_file(folder / "model.safetensors")
    names = {name: f"model-0000{1 + place % 2}-of-00002.safetensors" for place, name in enumerate(sorted(tensors))}
    for file in set(names.values()):
        part = {name: scale * tensors[name] for name in names if names[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_a_single_file_beside_the_index_of_an_older_model_is_read_as_transformers_reads_it(folder):
    """`save_pretrained` into the folder of a larger model removes its shards, and leaves their index."""
    shards(folder, 0.5)
    for file in folder.glob("model-*"):
        file.unlink()
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model.norm.weight
    read_model_spec("actor", folder, "lm")
    with OpenTensors(str(folder), "actor.path") as tensors:
        assert torch.equal(tensors.read("model.norm.weight", ((0, 64),)), expected)


def test_two_models_in_a_folder_are_refused(folder):
    """transformers reads the single file, and vLLM the files of the index."""
    shards(folder, 0.5)
    with pytest.raises(
        InvalidInput, match=r"got 'model.safetensors and model-00001-of-00002.* in .*expected one model"
    ):
        read_model_spec("actor", folder, "lm")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model.safetensors"}}))
    assert read_model_spec("actor", folder, "lm").shape.num_layers == 2  # an index of the single file itself


def test_reading_a_spec_imports_no_torch(made):
    """A flow may check a folder without loading an engine."""
    code = (
        "import sys; from prefect_rlhf.engines.files.huggingface import read_model_spec as r;"
        f"r('actor', {made!r}, 'lm'); assert not {{'torch', 'megatron', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("scalar", "tied"), [(False, True), (False, False), (True, False)])
def test_a_written_folder_is_the_model(tmp_path, scalar, tied, dtype):
    """Through the engine and back: plain transformers loads the same bits and gives the same outputs."""
    source = cases.make_folder(tmp_path / "source", scalar=scalar, tied=tied, layers=2, hidden=64)
    case = Case(source, head="scalar" if scalar else "lm", dtype=dtype)
    tensors = ((name, shard.view.reshape(shard.shape)) for name, shard in case.build(0).weights().items())
    write_folder(tmp_path / "written", case.spec(), tensors, source)
    kind = AutoModelForSequenceClassification if scalar else AutoModelForCausalLM
    expected = kind.from_pretrained(source, dtype=getattr(torch, dtype))
    found = kind.from_pretrained(tmp_path / "written", dtype="auto")
    assert found.dtype == expected.dtype
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    tokens = cases.make_rows(4)[0].tokens_BS
    assert torch.equal(found(tokens).logits, expected(tokens).logits)
    assert read_model_spec("actor", tmp_path / "written", case.head, dtype=dtype).shape == case.spec().shape


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_folder_of_two_heads_is_a_language_model_to_others(tmp_path, tied):
    """transformers finds its own weights and no others, vLLM takes the files of the index, and we read both heads."""
    source = two_heads.make_two_heads(tmp_path / "source", tied=tied, layers=2, hidden=64)
    case = Case(source, head="lm+scalar", dtype="bfloat16")
    written = tmp_path / "written"
    weights = case.build(0).weights()
    tensors = ((name, shard.view.reshape(shard.shape)) for name, shard in weights.items())
    write_folder(written, case.spec(), tensors, source)
    found, said = AutoModelForCausalLM.from_pretrained(written, dtype="auto", output_loading_info=True)
    assert not any(said.values())
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    named = set(json.loads((written / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert "score.weight" not in {name for file in named for name in load_file(written / file)}
    again = replace(case, folder=str(written)).build(0).weights()
    assert all(torch.equal(shard.view, weights[name].view) for name, shard in again.items())
    assert weights["score.weight"].view.any()


def test_an_export_has_all_chat_templates_or_the_models_own(tmp_path, made):
    """Of the two templates of a tokenizer, transformers takes `tool_use` for a chat with tools."""
    source = shutil.copytree(made, tmp_path / "source")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"<s>": 0}, "<s>")))
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(source)
    spec = read_model_spec("actor", source, "lm")
    for folder, own in (("same", None), ("own", "of mine")):
        (tmp_path / folder).mkdir()
        write_tokenizer(tmp_path / folder, replace(spec, chat_template=own), source)
    assert AutoTokenizer.from_pretrained(tmp_path / "same").chat_template == tokenizer.chat_template
    assert AutoTokenizer.from_pretrained(tmp_path / "own").chat_template == "of mine"


def test_a_written_critic_has_one_label_whatever_the_config_said_before(tmp_path, made):
    source = shutil.copytree(made, tmp_path / "source")
    edit(source, num_labels=3, id2label=None, label2id=None)
    case = Case(str(source), head="scalar", new_head=True)
    tensors = ((name, shard.view.reshape(shard.shape)) for name, shard in case.build(0).weights().items())
    write_folder(tmp_path / "written", case.spec(), tensors, source)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "written").score.out_features == 1


@pytest.mark.parametrize(("pad", "ends", "kept"), [(2, None, None), (2, [3, 2], None), (5, [3, 2], 5)])
def test_a_written_reward_model_scores_a_texts_last_token_also_if_it_pads_with_it(tmp_path, made, pad, ends, kept):
    """SmolLM2 pads with the token that ends an answer. transformers would return the score of the token before."""
    source = shutil.copytree(made, tmp_path / "source")
    edit(source, pad_token_id=pad, eos_token_id=2 if ends is None else 9)
    case = Case(str(source), head="scalar", new_head=True)
    tensors = {name: shard.view.reshape(shard.shape) for name, shard in case.build(0).weights().items()}
    tensors["score.weight"] = torch.linspace(-1, 1, tensors["score.weight"].numel()).reshape(1, -1)
    write_folder(tmp_path / "written", case.spec(), tensors.items(), source, ends=ends)
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path / "written", dtype=torch.float32)
    assert found.config.pad_token_id == kept
    tokens = torch.tensor([[4, 7, 6, 2]])
    expected = found.model(tokens).last_hidden_state[0, -1] @ found.score.weight[0]
    assert found(tokens).logits.item() == pytest.approx(expected.item())


def test_an_incomplete_folder_never_appears(tmp_path, made):
    """A missing tensor stops the writing, and an older folder of that name stays."""
    spec = read_model_spec("actor", made, "lm")
    target = shutil.copytree(made, tmp_path / "target")
    with pytest.raises(ValueError, match="no tensor was passed for"):
        write_folder(target, spec, iter(()), made)
    assert read_model_spec("actor", target, "lm").shape == spec.shape


def test_a_slice_is_read_alone(made):
    """Regions of a stored tensor, as tensor-parallel ranks load them."""
    whole = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).model.layers[1].mlp.down_proj.weight
    with OpenTensors(made, "actor.path") as tensors:
        part = tensors.read("model.layers.1.mlp.down_proj.weight", ((8, 24), (32, 64)))
    assert torch.equal(part, whole[8:24, 32:64])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_where_they_are_read(folder, value):
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    says = "actor.path: got 'model.norm.weight with NaN or infinite values in .*', expected weights that are finite"
    with OpenTensors(str(folder), "actor.path") as tensors, pytest.raises(InvalidInput, match=says):
        tensors.read("model.norm.weight", ((0, 64),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_and_infinity_are_found_everywhere_in_every_format(tmp_path, dtype):
    """Each of both signs; the largest numbers of a format, zeros and a part without values are read bit for bit."""
    limits = torch.finfo(dtype)
    plain = torch.tensor([limits.max, limits.min, limits.tiny, limits.smallest_normal / 2, 0.0, -0.0], dtype=dtype)
    wrong = torch.tensor([float("nan"), float("inf"), -float("inf"), float("nan")], dtype=dtype)
    wrong[3] = wrong[0].neg()
    places, columns = range(0, 67, 11), torch.arange(67)
    rows = plain[columns % len(plain)].repeat(len(wrong) * len(places) + 1, 1)
    for number in range(len(rows) - 1):
        rows[number, places[number // len(wrong)]] = wrong[number % len(wrong)]
    save_file({"rows": rows}, tmp_path / "model.safetensors")
    with OpenTensors(str(tmp_path), "actor.path") as tensors:
        for number in range(len(rows) - 1):
            with pytest.raises(InvalidInput, match="rows with NaN or infinite values in .*model.safetensors"):
                tensors.read("rows", ((number, number + 1), (0, 67)))
        read = tensors.read("rows", ((len(rows) - 1, len(rows)), (0, 67)))
        assert torch.equal(read.view(torch.uint8), rows[-1:].view(torch.uint8))
        assert tensors.read("rows", ((0, 0), (0, 67))).shape == (0, 67)


@pytest.mark.parametrize("in_config", [True, False])
def test_a_written_folder_has_the_chat_template_that_the_model_was_trained_with(tmp_path, in_config):
    """Wherever the folder that it came from has its own: in a file, or in tokenizer_config.json as earlier versions."""
    source, mine = (
        Path(cases.make_folder(tmp_path / "source", layers=2, hidden=64)),
        "{{ messages[0].content }}<|im_end|>",
    )
    stand_in("qwen2_5", source)
    if in_config:
        (source / "chat_template.jinja").unlink()
        settings = json.loads((source / "tokenizer_config.json").read_text())
        (source / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "{{ 'old' }}"}))
    case = Case(str(source), head="lm", dtype="float32")
    tensors = [(name, shard.view.reshape(shard.shape)) for name, shard in case.build(0).weights().items()]
    write_folder(tmp_path / "written", replace(case.spec(), chat_template=mine), tensors, source)
    assert AutoTokenizer.from_pretrained(tmp_path / "written").chat_template == mine
    assert (tmp_path / "written" / "chat_template.jinja").read_text() == mine
    assert "'old'" not in (tmp_path / "written" / "tokenizer_config.json").read_text()
    write_folder(tmp_path / "plain", case.spec(), tensors, tmp_path / "written")
    assert AutoTokenizer.from_pretrained(tmp_path / "plain").chat_template == mine


@pytest.mark.parametrize("has_file", [True, False])
def test_a_written_folder_ends_responses_where_its_chat_template_does(tmp_path, has_file):
    """After training on chats, other libraries stop there too. The other files of the tokenizer are copies."""
    source = Path(cases.make_folder(tmp_path / "source", layers=2, hidden=64))
    tokenizer = AutoTokenizer.from_pretrained(stand_in("qwen2_5", source), eos_token="<|endoftext|>")
    tokenizer.save_pretrained(source)
    (source / "generation_config.json").unlink(missing_ok=True)
    if has_file:
        (source / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.5}))
    case = Case(str(source), head="lm", dtype="float32")
    tensors = [(name, shard.view.reshape(shard.shape)) for name, shard in case.build(0).weights().items()]
    write_folder(tmp_path / "written", case.spec(), tensors, source)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "written")
    assert model.generation_config.eos_token_id[0] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == list(end_tokens(str(source)))
    assert (model.generation_config.temperature == 0.5) is has_file
    differ = filecmp.dircmp(source, tmp_path / "written")
    changed = {"generation_config.json"} if has_file else set()
    assert set(differ.diff_files) - {"model.safetensors", "config.json", "tokenizer_config.json"} == changed
    write_folder(tmp_path / "again", case.spec(), tensors, tmp_path / "written")
    again = [(tmp_path / name / "generation_config.json").read_bytes() for name in ("written", "again")]
    assert again[0] == again[1]
