"""The shape in a Hugging Face config.json: of any dense decoder that can be planned, whether engines run it or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.model import NO_BIASES, NOT_RUN, QUERY_BIASES, Head, TransformerShape

MOST_LAYERS = 10_000
MOST_WIDE = 1 << 20  # of a matrix, and of heads
MOST_TOKENS = 1 << 30  # of a vocabulary or a context
ATTENTION_BIASES = (*QUERY_BIASES, "self_attn.o_proj")
MLP_BIASES = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ARCHITECTURES: dict[Head, str] = {
    "lm": "LlamaForCausalLM",
    "scalar": "LlamaForSequenceClassification",
    "lm+scalar": "LlamaForCausalLM",  # the scalar head lies in a file of its own: see `tensor_files`
}
"""Those that our engines run, by how they end."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")


@dataclass(frozen=True, slots=True)
class Family:
    """What transformers takes the models of a `model_type` to be where config.json says nothing; `kind` of NOT_RUN."""

    kind: str
    context: int
    head_dim: int | None = None  # None: hidden size over heads
    tied: bool = False
    qk_norm: bool = False
    norms_after: bool = False
    always_biases: tuple[str, ...] = NO_BIASES
    heads: int | None = None
    kv_heads: int | None = None  # None: as many as heads
    vocabulary: int | None = None


_GEMMA3 = Family(
    "gemma3", 131072, 256, tied=True, qk_norm=True, norms_after=True, heads=8, kv_heads=4, vocabulary=262208
)
FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", 2048),
    "mistral": Family("mistral", 131072, kv_heads=8),
    "qwen2": Family("qwen2", 32768, always_biases=QUERY_BIASES, kv_heads=32),
    "qwen3": Family("qwen3", 32768, 128, qk_norm=True, kv_heads=32),
    "gemma": Family("gemma", 8192, 256, tied=True, kv_heads=16),
    "gemma2": Family("gemma2", 8192, 256, tied=True, norms_after=True, kv_heads=4),
    "gemma3_text": _GEMMA3,
}
"""The dense decoders that can be planned, by `model_type`."""


def read_config(folder: Path, role: str) -> dict[str, Any]:
    """Return a folder's config.json. Raises InvalidInput where there is none that is a JSON object."""
    if not folder.is_dir():
        raise InvalidInput(f"{role}.path", str(folder), "a Hugging Face folder on this machine")
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"{role}.path", str(folder), "a Hugging Face folder; this one has no config.json")
    field = f"{role}.config.json"
    try:
        config = json.loads((folder / "config.json").read_text())
    except (ValueError, RecursionError) as error:
        raise InvalidInput(field, str(error), "JSON") from error
    if not isinstance(config, dict):
        raise InvalidInput(field, config, "a JSON object")
    return config


def planned_shape(config: dict[str, Any], field: str) -> TransformerShape:
    """Return the shape of a model that can be planned; of one that sees pictures, of its text model.

    Raises InvalidInput for a mixture of experts and for what is no dense decoder that is known.
    """
    if isinstance(config.get("text_config"), dict) and config.get("model_type") == "gemma3":
        config, field = {"model_type": "gemma3_text"} | config["text_config"], f"{field}.text_config"
    for key in EXPERTS:
        if isinstance(count := config.get(key), int) and count > 1:
            raise InvalidInput(f"{field}.{key}", count, "a dense model: no plan is made for a mixture of experts")
    kind = config.get("model_type", architecture(config).partition("For")[0].lower())
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InvalidInput(f"{field}.model_type", kind, f"a dense decoder: {', '.join(FAMILIES)}")
    return shape_of(config, field, FAMILIES[kind])


def architecture(config: dict[str, Any]) -> str:
    """Return the first of a config's architectures; empty where it names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def shape_of(config: dict[str, Any], field: str, family: Family) -> TransformerShape:
    """Return the shape that a config says, with what the family has where it says nothing."""
    refuse_other_weights(config, field)
    heads = _size(config, "num_attention_heads", field, MOST_WIDE, family.heads)
    hidden = _size(config, "hidden_size", field, MOST_WIDE)
    kv_heads = _size(config, "num_key_value_heads", field, MOST_WIDE, family.kv_heads or heads)
    if heads % kv_heads:
        raise InvalidInput(f"{field}.num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
    theta = {"rope_theta": config.get("rope_theta") or 10000.0} | rope_settings(config, field)
    biases = family.always_biases
    biases += ATTENTION_BIASES if _flag(config, "attention_bias", field, False) and not biases else ()
    biases += MLP_BIASES if _flag(config, "mlp_bias", field, False) else ()
    return TransformerShape(
        hidden_size=hidden,
        intermediate_size=_size(config, "intermediate_size", field, MOST_WIDE),
        num_layers=_size(config, "num_hidden_layers", field, MOST_LAYERS),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_size(config, "head_dim", field, MOST_WIDE, family.head_dim or hidden // heads),
        vocab_size=_size(config, "vocab_size", field, MOST_TOKENS, family.vocabulary),
        max_position_embeddings=_size(config, "max_position_embeddings", field, MOST_TOKENS, family.context),
        rope_theta=_fraction(theta, "rope_theta", field, 1.0, 1e15),
        rms_norm_eps=_fraction({"rms_norm_eps": 1e-6} | config, "rms_norm_eps", field, 0.0, 1.0),
        tied_embeddings=_flag(config, "tie_word_embeddings", field, family.tied),
        biases=biases,
        qk_norm=family.qk_norm,
        norms_after=family.norms_after,
        not_run=_not_run(config, field, family, biases),
    )


def _not_run(config: dict[str, Any], field: str, family: Family, biases: tuple[str, ...]) -> str:
    """What our engines do not compute, in words; they refuse a run of it."""
    reasons = [NOT_RUN[family.kind]]
    if biases != family.always_biases:
        reasons.append(f"biases of {', '.join(name.rpartition('.')[2] for name in biases)}")
    if (kind := rope_kind(config, field)) != "default":
        reasons.append(f"rope_type {kind}")
    if family.kind == "llama":
        if (act := config.get("hidden_act", "silu")) != "silu":
            reasons.append(f"hidden_act {act}")
        if architecture(config) not in ARCHITECTURES.values():
            reasons.append(architecture(config) or "a config without architectures")
    return ", ".join(filter(None, reasons))


def refuse_other_weights(config: dict[str, Any], field: str) -> None:
    """Raise InvalidInput for quantised weights, and for code of its own."""
    for key, what in {"quantization_config": "no quantised weights", "auto_map": "no code of its own"}.items():
        if config.get(key):
            raise InvalidInput(f"{field}.{key}", config[key], f"{what}; only plain weights of the Llama family run")


def rope_settings(config: dict[str, Any], field: str) -> dict[str, Any]:
    """Return rotary settings: `rope_parameters` since transformers 5, `rope_scaling` before.

    Of a model whose layers have several, those of layers that attend to all tokens.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(settings, dict):
        raise InvalidInput(f"{field}.rope_parameters", settings, "a JSON object")
    of_all = settings.get("full_attention", settings)
    return of_all if isinstance(of_all, dict) else {}


def rope_kind(config: dict[str, Any], field: str) -> Any:
    """Return the kind of rotary embeddings; a scaling by 1 is none."""
    rope = rope_settings(config, field)
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "default" if kind == "linear" and rope.get("factor") == 1 else kind


def _flag(config: dict[str, Any], key: str, field: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise InvalidInput(f"{field}.{key}", value, "true or false")
    return value


def _size(config: dict[str, Any], key: str, field: str, most: int, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidInput(f"{field}.{key}", value, f"a whole number of 1 to {most}")
    return value


def _fraction(config: dict[str, Any], key: str, field: str, least: float, most: float) -> float:
    value = config[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidInput(f"{field}.{key}", value, f"a number of {least:g} to {most:g}")
    return float(value)
