"""Hugging Face folders of the Llama family: read what a role needs to know of one, and write one.

`read_model_spec` reads config.json and the headers of the safetensors files, no weights, and needs no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_rlhf.engines.files.model_config import (
    ARCHITECTURES,
    FAMILIES,
    planned_shape,
    read_config,
    refuse_other_weights,
    rope_kind,
    shape_of,
)
from prefect_rlhf.engines.files.tensor_files import (
    MAX_FILE_BYTES,
    StoredTensor,
    stored_tensors,
    write_folder_of_tensors,
)
from prefect_rlhf.engines.storage.mirror import fetch, readable
from prefect_rlhf.placement.atomic_file import write_atomically
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.layout.parameters import parameters
from prefect_rlhf.placement.model import Dtype, Head, ModelSpec, OptimizerSpec, TransformerShape
from prefect_rlhf.placement.remote_path import is_remote

if TYPE_CHECKING:
    from torch import Tensor

UNUSED = {"lm_head.weight", "score.weight"}  # heads that a role may leave aside
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)


def read_model_spec(
    role: str,
    path: str | Path,
    head: Head,
    *,
    dtype: Dtype = "bfloat16",
    new_head: bool = False,
    optimizer: OptimizerSpec | None = None,
) -> ModelSpec:
    """Describe the checkpoint in folder `path`, which may be remote, as `role`'s model.

    Raises InvalidInput, with field `<role>.path` or `<role>.config...`, for a folder that this role cannot use.
    """
    folder = readable(str(path), f"{role}.path")
    config, field = read_config(folder, role), f"{role}.config.json"
    _refuse_what_engines_do_not_run(config, field)
    shape = shape_of(config, field, FAMILIES["llama"])
    spec = ModelSpec(role, str(path) if is_remote(str(path)) else str(folder), head, shape, dtype, new_head, optimizer)
    _check_tensors(spec, stored_tensors(folder, f"{role}.path"))
    return spec


def read_shape(role: str, path: str | Path) -> TransformerShape:
    """Read the shape in a folder's config.json, and nothing else of the folder: of any model that can be planned.

    Raises InvalidInput for one that cannot.
    """
    folder = Path(path)
    if is_remote(str(path)):
        folder = fetch(str(path), f"{role}.path", lambda name: name == "config.json")
    return planned_shape(read_config(folder, role), f"{role}.config.json")


def write_folder(
    path: str | Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: str | Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a folder that plain `transformers` loads: config.json, safetensors files, the tokenizer's files.

    `tensors` come one by one under their Hugging Face names, whole, in any order, and are written as `spec.dtype`. A
    scalar head beside a language model's has a file of its own, which only `stored_tensors` reads, so that others load
    the language model. The folder appears under its name only when it is complete.
    """
    shapes = {p.name: p.shape for p in parameters(spec)}
    tokenizer_folder = readable(str(tokenizer), "tokenizer")
    apart = {"score.weight"} if spec.head == "lm+scalar" else set()

    def write(part: Path) -> None:
        part.mkdir()
        write_folder_of_tensors(part, shapes, spec.dtype, tensors, max_file_bytes, apart)
        (part / "config.json").write_text(json.dumps(_config_of(spec, tokenizer_folder), indent=2) + "\n")
        for name in TOKENIZER_FILES:
            if (tokenizer_folder / name).is_file():
                shutil.copyfile(tokenizer_folder / name, part / name)

    write_atomically(Path(path), write)


def _refuse_what_engines_do_not_run(config: dict[str, Any], field: str) -> None:
    """Refuse another architecture, and what the engines would silently compute otherwise."""
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if first is architectures or first not in ARCHITECTURES.values():
        right = "the Llama family: " + " or ".join(f"[{name}]" for name in dict.fromkeys(ARCHITECTURES.values()))
        raise InvalidInput(f"{field}.architectures", first, right)
    plain = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for key, expected in plain.items():
        if config.get(key, expected) != expected:
            raise InvalidInput(f"{field}.{key}", config[key], repr(expected))
    refuse_other_weights(config, field)
    if (kind := rope_kind(config, field)) != "default":
        raise InvalidInput(f"{field}.rope_type", kind, "'default' rotary embeddings")


def _check_tensors(spec: ModelSpec, stored: dict[str, StoredTensor]) -> None:
    """Check that every parameter is stored with the shape that config.json implies, and no other tensor."""
    field = f"{spec.role}.path"
    known = {parameter.name for parameter in parameters(spec)} | UNUSED
    for name in stored:
        if name not in known and not name.endswith(".rotary_emb.inv_freq"):
            raise InvalidInput(field, f"tensor {name} in {spec.path}", "parameters of the Llama family and no others")
    for name, shape in ((parameter.name, parameter.shape) for parameter in parameters(spec)):
        if name == "score.weight" and name not in stored:
            if not spec.new_head:
                raise InvalidInput(
                    field, spec.path, "a checkpoint with a scalar head (score.weight), or new_head: true"
                )
        elif name not in stored:
            raise InvalidInput(field, f"no tensor {name} in {spec.path}", "a checkpoint that holds it")
        elif stored[name].shape != shape:
            seen = f"{name} of shape {stored[name].shape} in {spec.path}"
            raise InvalidInput(field, seen, f"shape {shape}, as config.json says")


def _config_of(spec: ModelSpec, tokenizer: Path) -> dict[str, Any]:
    """Make config.json for a spec; token ids (bos, eos, pad) are those of the tokenizer's folder."""
    shape = spec.shape
    source = json.loads((tokenizer / "config.json").read_text()) if (tokenizer / "config.json").is_file() else {}
    ids = {key: source[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in source}
    if spec.head == "scalar":
        ids |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return ids | {
        "architectures": [ARCHITECTURES[spec.head]],
        "model_type": "llama",
        "dtype": spec.dtype,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,  # where transformers before 5 and vLLM look
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": shape.tied_embeddings,
        "use_cache": True,
    }
