"""Any dense config.json is read as transformers builds it, and what our engines do not run of it is said."""

import dataclasses
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from prefect_rlhf.engines.files.huggingface import read_model_spec, read_shape
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.models.families import known as families
from prefect_rlhf.placement.models.families.config_keys import GENERATION, HARMLESS, NOTES, ON, READ, is_off
from prefect_rlhf.placement.models.known_models import KNOWN_SHAPES
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import parameters

pytestmark = pytest.mark.quick

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
RUN = {"mistral", "qwen2", "qwen3", "gemma3_text"}  # with these options
FAMILIES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": None, "architectures": ["MistralForCausalLM"]},
    "qwen2": {"use_sliding_window": False, "sliding_window": 4096, "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"head_dim": 32, "architectures": ["Qwen3ForCausalLM"]},
    "gemma": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32, "architectures": ["Gemma3ForCausalLM"]},
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4},
}


def written(folder, content):
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def as_transformers_stacks(shapes):
    """Experts' gates and ups are one tensor there, without `.weight`."""
    stacked = dict(shapes)
    for name, (count, rows, columns) in ((n, s) for n, s in shapes.items() if ".experts." in n):
        prefix, _, part = name.removesuffix("_proj.weight").rpartition(".")
        del stacked[name]
        if part != "up":
            stacked[f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj"] = (
                count,
                rows if part == "down" else 2 * rows,
                columns,
            )
    return stacked


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_match_transformers(kind, tmp_path):
    """Names and shapes, of a model that is built without memory from the same config.json."""
    config = AutoConfig.for_model(kind, **SIZES, **FAMILIES[kind])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(value.shape) for name, value in model.named_parameters()}  # a tied one once
    shape = read_shape("actor", tmp_path)
    found = {p.name: p.shape for p in parameters(ModelSpec("actor", "", "lm", shape))}
    assert as_transformers_stacks(found) == expected
    assert shape.max_position_embeddings == config.max_position_embeddings
    assert bool(shape.not_run) == (kind not in RUN)


@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - RUN))
def test_a_run_refuses_what_can_only_be_planned(kind, tmp_path):
    config = AutoConfig.for_model(kind, **SIZES, **FAMILIES[kind], architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    right = "expected false: only" if kind == "llama" else "expected a family that runs: llama, mistral"
    if kind in ("qwen3_moe", "mixtral"):
        right = (
            r"experts: got \d, expected a dense model: mixtures of experts of qwen3_moe and mixtral can be planned, but"
        )
    with pytest.raises(InvalidInput, match=right):
        read_model_spec("actor", tmp_path, "lm")


@pytest.mark.parametrize("kind", [family.model_type for family in families.RUN])
def test_every_config_key_is_read_or_known_to_be_harmless(kind):
    """Of all that transformers' class for the family has: one forgotten would be passed over."""
    config = AutoConfig.for_model(kind)
    known = READ | HARMLESS | GENERATION | families.FAMILIES[kind].keys
    assert not [
        key
        for key, value in config.to_dict().items()
        if key not in known and not is_off(value) and not key.startswith(NOTES)
    ]
    own, common = ({field.name for field in dataclasses.fields(of)} for of in (config, PreTrainedConfig))
    assert own - common <= known


@pytest.mark.parametrize("said", [False, True])
def test_a_switch_that_is_on_unless_a_file_turns_it_off_is_obeyed_or_refused(said, tmp_path):
    """Embedding models on Llama's and Qwen's layers have `is_causal: false`. transformers then masks nothing."""
    config = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "is_causal": said}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
    tokens = torch.tensor([[5, 9, 17], [5, 9, 33]])
    with torch.no_grad():
        first, other = model(tokens).logits[:, 0]
    assert torch.equal(first, other) is said
    assert bool(read_shape("actor", written(tmp_path, config)).not_run) is not said
    unclear = written(tmp_path, config | {"is_causal": None})  # vLLM takes it as false
    assert read_shape("actor", unclear).not_run == "is_causal None"


def test_every_switch_that_is_on_without_a_key_is_known():
    """Of the code that all models of transformers and vLLM's classes of our families share."""
    places = [find_spec("transformers").submodule_search_locations[0]] * 2
    places += [find_spec("vllm").submodule_search_locations[0]]
    patterns = ["masking_utils.py", "models/{}/modeling_*.py", "model_executor/models/{}.py"]
    names = {family.model_type.removesuffix("_text") for family in families.RUN}
    files = {Path(place, what.format(name)) for place, what in zip(places, patterns, strict=True) for name in names}
    texts = [file.read_text() for each in files for file in each.parent.glob(each.name)]
    found = {key for text in texts for key in re.findall(r'getattr\(\s*(?:self\.)?config,\s*"(\w+)",\s*True', text)}
    assert found == ON


ON_THE_HUB = {
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mixtral",
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
}
"""What changes the function, of the config.json of each."""


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_mixture_by_name_matches_its_config(name, tmp_path):
    assert read_shape("actor", written(tmp_path, ON_THE_HUB[name])) == KNOWN_SHAPES[name]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_as_many_key_value_heads_as_heads_are_meant_by_null(tmp_path, kind):
    content = SIZES | {"model_type": kind, "num_key_value_heads": None} | FAMILIES[kind]
    config = AutoConfig.for_model(**content)
    assert read_shape("actor", written(tmp_path, content)).num_kv_heads == config.num_key_value_heads == 4


@pytest.mark.parametrize("said", [{"head_dim": 33}, {"hidden_size": 60}])
def test_a_head_of_an_odd_width_is_refused(tmp_path, said):
    """As transformers refuses it, whether it is said or follows from the hidden size."""
    content = SIZES | {"model_type": "llama"} | said
    with pytest.raises(InvalidInput, match=r"actor\.config\.json\.head_dim: got \d+, expected an even number"):
        read_shape("actor", written(tmp_path, content))
    with pytest.raises(StrictDataclassClassValidationError, match="even rotary dimension"):
        AutoConfig.for_model(**content)


def test_missing_config_keys_take_transformers_defaults(tmp_path):
    """Gemma 3's config.json with pictures leaves out most of its text model."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = read_shape("actor", written(tmp_path, {"model_type": "gemma3", "text_config": text}))
    config = AutoConfig.for_model("gemma3_text", **text)
    assert (shape.num_attention_heads, shape.num_kv_heads) == (config.num_attention_heads, config.num_key_value_heads)
    assert (shape.head_dim, shape.vocab_size) == (config.head_dim, config.vocab_size)
    assert shape.tied_embeddings and shape.max_position_embeddings == config.max_position_embeddings


DEFAULT = {"rope_type": "default", "rope_theta": 7e5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LONGER = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
"""As Qwen's pages say to add it to config.json."""
NESTED = {"full_attention": DEFAULT, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
ROPES = {
    "new and old": {"rope_parameters": DEFAULT, "rope_scaling": LLAMA3},
    "new, and old with a base": {"rope_parameters": LLAMA3 | {"rope_theta": 1e3}, "rope_scaling": DEFAULT},
    "new, old and a base apart": {"rope_parameters": DEFAULT, "rope_scaling": LLAMA3, "rope_theta": 2e4},
    "new with null": {"rope_parameters": LLAMA3 | {"rope_theta": 7e5}, "rope_scaling": None, "rope_theta": 2e4},
    "by kind of layer": {"model_type": "gemma3_text", "rope_parameters": NESTED, "rope_theta": 1e3},
    "windows alone": {"model_type": "gemma3_text", "rope_parameters": NESTED | {"full_attention": None}},
    "by kind, and old": {"model_type": "gemma3_text", "rope_parameters": NESTED, "rope_scaling": {"rope_theta": 9e4}},
}


@pytest.mark.parametrize("keys", ROPES.values(), ids=ROPES)
def test_rotary_settings_in_several_keys_are_read_as_transformers_reads_them(keys, tmp_path):
    config = {"model_type": "llama", "head_dim": 32, **SIZES, **json.loads(json.dumps(keys))}
    shape = read_shape("actor", written(tmp_path, config))
    expected = AutoConfig.for_model(**config).rope_parameters
    of_all = expected.get("full_attention", expected)
    assert not shape.not_run.replace("architectures None", "") and shape.rope_theta == of_all["rope_theta"]
    assert (shape.rope_scaling.factor if shape.rope_scaling else None) == of_all.get("factor")
    if "sliding_attention" in expected:
        assert shape.window.rope_theta == expected["sliding_attention"]["rope_theta"]


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"rope_parameters": DEFAULT, "rope_scaling": LONGER}, "rope_type: got 'yarn', expected 'default' or 'llama3'"),
        ({"rope_parameters": NESTED}, r"rope_parameters.full_attention: unknown key \(got .*have no such key here"),
        ({"rope_scaling": "yarn"}, "rope_scaling: got 'yarn', expected a JSON object"),
        (
            {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "rope_parameters": DEFAULT},
            r"rope_parameters.rope_type: unknown key \(got 'default'\); Gemma3 has settings by kind of layer",
        ),
        (
            {
                "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
                "rope_parameters": NESTED, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            "rope_type: got 'linear', expected 'default' or 'llama3'",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_rotary_settings_that_transformers_would_drop_or_add_are_refused(keys, line, tmp_path):
    """Whichever of several keys has them."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "head_dim": 32, **SIZES, **keys}
    with pytest.raises(InvalidInput, match=line):
        read_model_spec("actor", written(tmp_path, config), "lm")


MOE = {"model_type": "qwen3_moe", "moe_intermediate_size": 32}
SWITCHED_OFF = [
    {"attention_bias": False},
    {"mlp_bias": None},
    {"rope_scaling": None},
    {"rope_scaling": {"type": "linear", "factor": 1.0}},
    {"sliding_window": 4096, "use_sliding_window": False},
    {"quantization_config": None},
    {"num_local_experts": 0},
    {"hidden_act": "silu"},
    {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"dtype": "q4"}},
    {"use_mrope": False, "_attn_implementation_autoset": True, "unsloth_version": "2025.1"},
]


@pytest.mark.parametrize("off", SWITCHED_OFF, ids=str)
def test_switched_off_features_are_not_refused(off, tmp_path):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES, **off}
    assert not read_shape("actor", written(tmp_path, config)).not_run


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"model_type": "llama", "num_local_experts": 8}, "num_local_experts: got 8, expected a dense model"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "n_routed_experts: got 256, expected a dense model"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts: got 0, expected a whole number of 1"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok: got 9, expected a whole number"),
        (MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers: got \[0\], expected \[\]: plans have experts in every"),
        (MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step: got 2, expected 1: plans have experts in every"),
        (MOE | {"shared_expert_intermediate_size": 64}, r"size: unknown key \(got 64\); Qwen3Moe has no shared"),
        (MOE | {"moe_intermediate_size": None}, "moe_intermediate_size: got None, expected a whole number"),
        ({"model_type": "gpt2"}, "model_type: got 'gpt2', expected a decoder: llama, mistral, qwen2"),
        ({"model_type": ["llama"]}, "model_type: got .*, expected a decoder"),
        ({"model_type": "llama", "attention_bias": "no"}, "attention_bias: got 'no', expected true or false"),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "quantization_config: .*no quantised weights"),
    ],
    ids=str,
)
def test_an_unplannable_config_is_refused_in_one_line(other, line, tmp_path):
    with pytest.raises(InvalidInput, match=line) as raised:
        read_shape("actor", written(tmp_path, SIZES | other))
    assert "\n" not in str(raised.value)
