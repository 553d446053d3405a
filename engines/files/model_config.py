"""Reads the shape in a Hugging Face config.json, for any decoder that can be planned, whether or not engines run it."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.files.other_folders import without_config
from prefect_rlhf.errors.errors import InvalidInput, UnknownKey
from prefect_rlhf.files.foreign_file import read_json
from prefect_rlhf.placement.models.families.config_keys import GENERATION, HARMLESS, NOTES, ON, READ, ROPE, is_off
from prefect_rlhf.placement.models.families.family import Family
from prefect_rlhf.placement.models.families.known import FAMILIES, RUN
from prefect_rlhf.placement.models.model import QUERY_BIASES, Experts, RopeScaling, SlidingWindow, TransformerShape

_FORMAT = re.compile(r"(torch\.)?(b?float\d+\w*|u?int\d+|half|double|auto)")
MOST_LAYERS = 10_000
MOST_WIDE = 1 << 20  # of a matrix, and of heads
MOST_TOKENS = 1 << 30  # of a vocabulary or a context
LOCAL, WHOLE = "sliding_attention", "full_attention"
"""Kinds of layers, as transformers calls them."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
SHARED_EXPERTS = ("num_shared_experts", "n_shared_experts", "shared_expert_intermediate_size")
MOST_EXPERTS = 10_000


def read_config(folder: Path, role: str) -> dict[str, Any]:
    """Return a folder's config.json. Raises InvalidInput if it is missing or not a JSON object."""
    if folder.is_file():
        raise InvalidInput(f"{role}.path", str(folder), f"a Hugging Face folder, not a file in it: {folder.parent}")
    if not folder.is_dir():
        expected = "a Hugging Face folder on this machine, or a model's name on the Hub: Qwen/Qwen2.5-0.5B, ..."
        raise InvalidInput(f"{role}.path", str(folder), expected)
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"{role}.path", str(folder), f"a Hugging Face folder; {without_config(folder)}")
    field = f"{role}.config.json"
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError) as error:
        raise InvalidInput(field, str(error), "JSON") from error
    if not isinstance(config, dict):
        raise InvalidInput(field, config, "a JSON object")
    for key in ("dtype", "torch_dtype"):  # transformers looks the name up in torch, and says no more than that
        if isinstance(name := config.get(key), str) and not _FORMAT.fullmatch(name):
            raise InvalidInput(f"{field}.{key}", name, "a number format of torch, such as bfloat16 or float32")
    return config


def planned_shape(config: dict[str, Any], field: str) -> TransformerShape:
    """Return the shape of a model that can be planned; for a model that reads images, its text model's.

    Raises InvalidInput for a mixture of experts of another family, and for a config of an unknown decoder.
    """
    if isinstance(config.get("text_config"), dict) and config.get("model_type") == "gemma3":
        config, field = {"model_type": "gemma3_text"} | config["text_config"], f"{field}.text_config"
    family = _family(config, field, FAMILIES, "a decoder")
    refuse_other_weights(config, field)
    reasons = (f"{error.field.rpartition('.')[2]} {error.seen}" for error in not_run(config, field, family))
    return shape_of(config, field, family, ", ".join((family.not_run,) if family.not_run else reasons))


def runnable_shape(config: dict[str, Any], field: str) -> TransformerShape:
    """Return the shape of a model that engines run. Raises InvalidInput for any other model."""
    family = _family(config, field, {family.model_type: family for family in RUN}, "a family that runs")
    refuse_other_weights(config, field)
    for error in not_run(config, field, family):
        raise error
    return shape_of(config, field, family)


def shape_of(config: dict[str, Any], field: str, family: Family, reasons: str = "") -> TransformerShape:
    """Return a config's shape, with the family's values for absent keys."""
    heads = _size(config, "num_attention_heads", field, MOST_WIDE, family.heads)
    hidden = _size(config, "hidden_size", field, MOST_WIDE)
    unsaid_kv_heads = heads if "num_key_value_heads" in config else family.kv_heads  # null means heads
    kv_heads = _size(config, "num_key_value_heads", field, MOST_WIDE, unsaid_kv_heads or heads)
    if heads % kv_heads:
        raise InvalidInput(f"{field}.num_key_value_heads", kv_heads, f"a divisor of the {heads} attention heads")
    theta = {"rope_theta": config.get("rope_theta") or family.rope_theta} | _rope_settings(config, field, family)
    head_dim = _size(config, "head_dim", field, MOST_WIDE, family.head_dim or hidden // heads)
    if head_dim % 2:
        raise InvalidInput(f"{field}.head_dim", head_dim, "an even number: rotary embeddings turn pairs")
    num_layers = _size(config, "num_hidden_layers", field, MOST_LAYERS)
    width_key = "intermediate_size" if family.experts is None else family.experts.width_key
    return TransformerShape(
        hidden_size=hidden,
        intermediate_size=_size(config, width_key, field, MOST_WIDE),
        num_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_size(config, "vocab_size", field, MOST_TOKENS, family.vocabulary),
        max_position_embeddings=_size(config, "max_position_embeddings", field, MOST_TOKENS, family.context),
        rope_theta=_fraction(theta, "rope_theta", field, 1.0, 1e15),
        rms_norm_eps=_epsilon(config, field),
        tied_embeddings=_flag(config, "tie_word_embeddings", field, family.tied),
        biases=_biases(config, field, family),
        qk_norm=family.qk_norm,
        norms_after=family.norms_after,
        not_run=reasons,
        family=family.model_type,
        rope_scaling=_rope_scaling(config, field, family),
        window=_window(config, field, family, num_layers),
        score_width=_score_width(config, field, family, head_dim),
        experts=_experts(config, field, family),
    )


def not_run(config: dict[str, Any], field: str, family: Family) -> Iterator[InvalidInput]:
    """Yield an error for each part of a config that our engines do not compute; no setting with an effect is
    skipped.
    """
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if first is architectures or first not in family.architectures:
        right = " or ".join(f"[{name}]" for name in family.architectures)
        yield InvalidInput(f"{field}.architectures", first, f"{right}, as model_type {family.model_type} has it")
    if set(_biases(config, field, family)) not in (set(), set(QUERY_BIASES)):
        key = next(key for key in family.bias_switches if config.get(key))
        yield InvalidInput(f"{field}.{key}", config[key], "false: only queries, keys and values may have biases")
    for key, right in family.only.items():
        if config.get(key) is not None and config[key] != right:
            yield InvalidInput(f"{field}.{key}", config[key], repr(right))
    yield from _rope_not_run(config, field, family)
    yield from _window_not_run(config, field, family)
    if not family.head_dim_is_free:
        width, even = config.get("head_dim"), _even_head(config)
        if width is not None and width != even:
            yield InvalidInput(f"{field}.head_dim", width, f"{even}, hidden_size over heads: vLLM refuses others")
    yield from _keys_not_run(config, field, family)


def refuse_other_weights(config: dict[str, Any], field: str) -> None:
    """Raise InvalidInput for quantised weights, and for a model that brings its own code."""
    for key, what in {"quantization_config": "no quantised weights", "auto_map": "no code of its own"}.items():
        if config.get(key):
            raise InvalidInput(f"{field}.{key}", config[key], f"{what}; only plain weights of a known family run")


def _keys_not_run(config: dict[str, Any], field: str, family: Family) -> Iterator[InvalidInput]:
    """Yield an error for each key that no family has, and for each switch that is on without it."""
    for key in sorted(ON & config.keys()):
        if config[key] is not True:
            yield InvalidInput(f"{field}.{key}", config[key], "true, or no value: transformers and vLLM obey it")
    known = READ | HARMLESS | GENERATION | ON | family.keys
    if config.get("use_sliding_window") is False:
        known |= {"sliding_window", "max_window_layers"}
    for key in sorted(config.keys() - known):
        if not is_off(config[key]) and not key.startswith(NOTES):
            hint = f"no {family.name} has it; remove it if it changes nothing"
            yield UnknownKey(f"{field}.{key}", config[key], hint)


def _family(config: dict[str, Any], field: str, among: Mapping[str, Family], what: str) -> Family:
    architectures = config.get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    kind = config.get("model_type", first.partition("For")[0].lower())
    family = among.get(kind) if isinstance(kind, str) else None
    if family is None or family.experts is None:
        for key in EXPERTS:
            if isinstance(count := config.get(key), int) and count > 1:
                mixtures = " and ".join(mixture.model_type for mixture in FAMILIES.values() if mixture.experts)
                right = f"a dense model: mixtures of experts of {mixtures} can be planned, but do not run"
                raise InvalidInput(f"{field}.{key}", count, right)
    if family is None:
        raise InvalidInput(f"{field}.model_type", kind, f"{what}: {', '.join(among)}")
    return family


def _biases(config: dict[str, Any], field: str, family: Family) -> tuple[str, ...]:
    """Return the matrices of a layer that have a bias."""
    switched = (names for key, names in family.bias_switches.items() if _flag(config, key, field, False))
    return sum(switched, family.always_biases)


def _epsilon(config: dict[str, Any], field: str) -> float:
    """Return the epsilon of norms. Raises InvalidInput for a whole number: transformers refuses such a file."""
    value = _fraction({"rms_norm_eps": 1e-6} | config, "rms_norm_eps", field, 0.0, 1.0)
    if isinstance(config.get("rms_norm_eps"), int):
        raise InvalidInput(
            f"{field}.rms_norm_eps", config["rms_norm_eps"], f"{value}: transformers refuses a whole number"
        )
    return value


def _even_head(config: dict[str, Any]) -> int | None:
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _window_not_run(config: dict[str, Any], field: str, family: Family) -> Iterator[InvalidInput]:
    """Yield an error for an active window that is shorter than the context."""
    if family.window is None:
        return
    kinds = config.get("layer_types") if "layer_types" in family.window.others else None
    num_layers = _size(config, "num_hidden_layers", field, MOST_LAYERS)
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != num_layers):
        yield InvalidInput(f"{field}.layer_types", kinds, f"null, or a list with the kinds of {num_layers} layers")
    elif kinds and any(kind != "full_attention" for kind in kinds):
        other = next(kind for kind in kinds if kind != "full_attention")
        yield InvalidInput(f"{field}.layer_types", other, "full_attention in every layer")
    if family.window.switch is not None and not _flag(config, family.window.switch, field, False):
        return
    window = config.get("sliding_window", family.window.default)
    if window is None:
        return
    context = _size(config, "max_position_embeddings", field, MOST_TOKENS, family.context)
    if _size(config, "sliding_window", field, MOST_TOKENS, family.window.default) < context:
        yield InvalidInput(
            f"{field}.sliding_window", window, f"null, or {context}, the context: no shorter window runs"
        )


def _window(config: dict[str, Any], field: str, family: Family, num_layers: int) -> SlidingWindow | None:
    """Return the layers with a window of tokens, in a family with windows; None if all layers attend to all tokens."""
    local = family.local_layers
    if local is None:
        return None
    every = _size(config, "sliding_window_pattern", field, MOST_LAYERS, local.every)
    kinds = config.get("layer_types") or kinds_of_layers(every, num_layers)
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= {LOCAL, WHOLE}:
        raise InvalidInput(f"{field}.layer_types", kinds, f"{num_layers} of {LOCAL} and {WHOLE}")
    layers = tuple(number for number, kind in enumerate(kinds) if kind == LOCAL)
    theta = {"rope_theta": config.get("rope_local_base_freq") or local.rope_theta} | _local_rope(config)
    tokens = _size(config, "sliding_window", field, MOST_TOKENS, local.tokens)
    return SlidingWindow(tokens, layers, _fraction(theta, "rope_theta", field, 1.0, 1e15)) if layers else None


def kinds_of_layers(every: int, num_layers: int) -> list[str]:
    """Return `layer_types` by `sliding_window_pattern`: every `every`-th layer attends to all tokens."""
    return [LOCAL if (number + 1) % every else WHOLE for number in range(num_layers)]


def _local_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of layers with a window; empty if there are no such layers."""
    settings = config.get("rope_parameters")
    of_local = settings.get(LOCAL) if isinstance(settings, dict) else None
    return of_local if isinstance(of_local, dict) else {}


def _experts(config: dict[str, Any], field: str, family: Family) -> Experts | None:
    """Return the experts of every layer. Raises InvalidInput if layers differ or experts are shared by all tokens."""
    keys = family.experts
    if keys is None:
        return None
    for key, right in keys.uniform.items():
        if config.get(key) is not None and config[key] != right:
            raise InvalidInput(
                f"{field}.{key}", config[key], f"{right!r}: plans have experts in every layer or in no layer"
            )
    for key in SHARED_EXPERTS:
        if not is_off(config.get(key)):
            raise UnknownKey(f"{field}.{key}", config[key], f"{family.name} has no shared experts")
    count_key = next((key for key in keys.count_keys if config.get(key) is not None), keys.count_keys[0])
    count = _size(config, count_key, field, MOST_EXPERTS, keys.count)
    return Experts(count, _size(config, "num_experts_per_tok", field, count, keys.per_token))


def _score_width(config: dict[str, Any], field: str, family: Family, head_dim: int) -> int | None:
    """Return the width whose root divides the attention scores; None for the head's own width."""
    if "query_pre_attn_scalar" not in family.reads:
        return None
    width = _size(config, "query_pre_attn_scalar", field, MOST_WIDE, family.head_dim)
    return None if width == head_dim else width


def _rope_not_run(config: dict[str, Any], field: str, family: Family) -> Iterator[InvalidInput]:
    """Yield errors for rotary settings other than the default and Llama 3.1's."""
    rope = _rope_settings(config, field, family)
    if (kind := _rope_kind(rope)) not in ("default", "llama3"):
        yield InvalidInput(f"{field}.rope_type", kind, "'default' or 'llama3' rotary embeddings")
    of_local = _local_rope(config)
    if (kind := _rope_kind(of_local)) != "default":
        yield InvalidInput(f"{field}.rope_parameters.{LOCAL}.rope_type", kind, "'default' rotary embeddings")
    for key, value in sorted((*rope.items(), *of_local.items()), key=str):
        if key not in ROPE and not is_off(value) and (key, value) != ("partial_rotary_factor", 1):
            yield UnknownKey(f"{field}.rope_parameters.{key}", value, "rotary embeddings have no such key here")
    if family.local_layers is not None:
        for key, value in _object(config, "rope_parameters", field).items():
            if key not in (WHOLE, LOCAL) and not is_off(value):
                hint = f"{family.name} has settings by kind of layer, in {WHOLE} and {LOCAL}"
                yield UnknownKey(f"{field}.rope_parameters.{key}", value, hint)


def _rope_settings(config: dict[str, Any], field: str, family: Family) -> dict[str, Any]:
    """Return rotary settings; in a family with windows, those of layers that attend to all tokens.

    They are `rope_parameters` since transformers 5, and `rope_scaling` before. A file may have both, because Qwen's
    pages say to add a `rope_scaling` for long texts. transformers then reads `rope_scaling` and drops the other; in a
    family with windows it adds the one to the other.
    """
    settings, scaling = (_object(config, key, field) for key in ("rope_parameters", "rope_scaling"))
    if family.local_layers is None:
        return scaling or settings
    of_all = settings.get(WHOLE)
    return (of_all if isinstance(of_all, dict) else {}) | scaling


def _object(config: dict[str, Any], key: str, field: str) -> dict[str, Any]:
    """Return the JSON object of a key; empty if it is absent or null."""
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise InvalidInput(f"{field}.{key}", found, "a JSON object")
    return found


def _rope_kind(rope: Mapping[str, Any]) -> Any:
    """Return the kind of rotary embeddings; a scaling by 1 counts as no scaling."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    return "default" if kind == "linear" and rope.get("factor") == 1 else kind


def _rope_scaling(config: dict[str, Any], field: str, family: Family) -> RopeScaling | None:
    """Return the scaling of `rope_type: llama3`; None for another type."""
    rope = _rope_settings(config, field, family)
    if _rope_kind(rope) != "llama3":
        return None
    place = f"{field}.rope_parameters"
    low, high = (_fraction(rope, key, place, 1e-6, 1e6) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise InvalidInput(f"{place}.high_freq_factor", high, f"more than low_freq_factor, {low:g}")
    context = _size(rope, "original_max_position_embeddings", place, MOST_TOKENS)
    return RopeScaling(_fraction(rope, "factor", place, 1.0, 1e6), low, high, context)


def _flag(config: dict[str, Any], key: str, field: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, bool):
        raise InvalidInput(f"{field}.{key}", value, "true or false")
    return value


def _size(config: Mapping[str, Any], key: str, field: str, most: int, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidInput(f"{field}.{key}", value, f"a whole number of 1 to {most}")
    return value


def _fraction(config: Mapping[str, Any], key: str, field: str, least: float, most: float) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise InvalidInput(f"{field}.{key}", value, f"a number of {least:g} to {most:g}")
    return float(value)
