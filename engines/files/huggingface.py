"""Hugging Face folders: reads what a role needs to know, and writes folders.

`read_model_spec` reads config.json and the headers of the safetensors files, no weights, and needs no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_rlhf.engines.files.model_config import (
    LOCAL,
    WHOLE,
    kinds_of_layers,
    planned_shape,
    read_config,
    runnable_shape,
)
from prefect_rlhf.engines.files.tensor_files import (
    MAX_FILE_BYTES,
    StoredTensor,
    equal_bytes,
    stored_tensors,
    write_folder_of_tensors,
)
from prefect_rlhf.engines.sampling.chats.answer_end import end_tokens
from prefect_rlhf.engines.sampling.chats.listed_ends import listed_ends
from prefect_rlhf.engines.sampling.chats.tokenizers import corrected_files, for_version_4
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.files.foreign_file import read_json_object
from prefect_rlhf.files.model_folder import TEMPLATE_FILE, TEMPLATES, TOKENIZER_CONFIG
from prefect_rlhf.files.remote_path import is_remote
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.model import Dtype, Head, ModelSpec, OptimizerSpec, RopeScaling, TransformerShape
from prefect_rlhf.placement.models.weights import parameters

if TYPE_CHECKING:
    from torch import Tensor

UNUSED = {"lm_head.weight", "score.weight"}  # heads that a role may not need
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKENIZER_FILES = (
    "tokenizer.json",
    TOKENIZER_CONFIG,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_FILE,
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
    eos_token: str | None = None,
) -> ModelSpec:
    """Describe the checkpoint in folder `path`, which may be remote or a name on the Hub, as `role`'s model.

    Raises InvalidInput, with field `<role>.path` or `<role>.config...`, for a folder that this role cannot use.
    """
    folder = model_folder(str(path), f"{role}.path")
    config, field = read_config(folder, role), f"{role}.config.json"
    shape = runnable_shape(config, field)
    place = str(path) if is_remote(str(path)) else str(folder)
    spec = ModelSpec(role, place, head, shape, dtype, new_head, optimizer, eos_token, content=_content(place, folder))
    _check_tensors(spec, stored_tensors(folder, f"{role}.path"))
    return spec


def read_shape(role: str, path: str | Path) -> TransformerShape:
    """Read only the shape from a folder's config.json, for any model that can be planned.

    Raises InvalidInput for another model.
    """
    folder = model_folder(str(path), f"{role}.path", "config")
    return planned_shape(read_config(folder, role), f"{role}.config.json")


def read_content(role: str, path: str | Path) -> str:
    """Return a key for a folder's content: roles that read the same folder have the same frozen weights."""
    return _content(str(path), model_folder(str(path), f"{role}.path", "config"))


def _content(path: str, folder: Path) -> str:
    return path if is_remote(path) else str(folder.resolve())


def write_folder(
    path: str | Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: str | Path,
    max_file_bytes: int = MAX_FILE_BYTES,
    ends: Sequence[int] | None = None,
) -> None:
    """Write a folder that plain `transformers` loads: config.json, safetensors files, the tokenizer's files.

    `tensors` are whole, with Hugging Face names, in any order; they are written as `spec.dtype`. A scalar head next to
    a language model's head has a file of its own, which only `stored_tensors` reads, so that other libraries load the
    language model. The tokenizer's files are copied, but generation_config.json lists all `ends` of a response; None
    takes them from the folder and its tokenizer. If the model has a chat template of its own, it replaces the folder's.
    The folder appears under its name only when it is complete.
    """
    shapes = {p.name: p.shape for p in parameters(spec)}
    tokenizer_folder = model_folder(str(tokenizer), "tokenizer", "tokenizer")
    apart = {"score.weight"} if spec.head == "lm+scalar" else set()

    def write(part: Path) -> None:
        part.mkdir()
        write_folder_of_tensors(part, shapes, spec.dtype, tensors, max_file_bytes, apart)
        (part / "config.json").write_text(json.dumps(_config_of(spec, tokenizer_folder, ends), indent=2) + "\n")
        write_tokenizer(part, spec, tokenizer_folder)
        if "lm" in spec.head:
            _name_ends(part, spec.eos_token, ends)

    write_atomically(Path(path), write)


def write_tokenizer(folder: Path, spec: ModelSpec, tokenizer: Path) -> None:
    """Copy the tokenizer's files, with the model's own chat template if it has one.

    Files that transformers 5 misreads are corrected, and what only transformers 5 reads is written for version 4 too.
    """
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, folder / name)
    for name, text in corrected_files(str(tokenizer)).items():
        (folder / name).write_text(text)
    if spec.chat_template is not None:
        (folder / TEMPLATE_FILE).write_text(spec.chat_template)
    elif (tokenizer / TEMPLATES).is_dir():
        (folder / TEMPLATES).mkdir()
        for file in (tokenizer / TEMPLATES).glob("*.jinja"):
            shutil.copyfile(file, folder / TEMPLATES / file.name)
    if (file := folder / TOKENIZER_CONFIG).is_file():
        content = read_json_object(file.name, file)
        template = folder / TEMPLATE_FILE
        older = for_version_4(content, template.read_text() if template.is_file() else None)
        if older != content:
            file.write_text(json.dumps(older, indent=2, ensure_ascii=False) + "\n")


def _name_ends(folder: Path, eos_token: str | None, ends: Sequence[int] | None) -> None:
    """Let generation_config.json name every token that ends a response here, so that other libraries end there too.

    A file that names them is not changed.
    """
    try:
        named = listed_ends(folder)
        ends = end_tokens(str(folder), eos_token) if ends is None else ends
    except InvalidInput:  # no file that transformers reads: the trained weights are worth more than this line
        return
    if set(ends) <= set(named):
        return
    file = folder / "generation_config.json"
    if file.is_file():
        content = read_json_object(file.name, file)
    else:  # without the file, transformers takes these from config.json
        content = {key: value for key, value in _stored_config(folder).items() if key in TOKEN_IDS}
    content.pop("_from_model_config", None)  # with it, transformers takes the ends of config.json instead
    file.write_text(json.dumps(content | {"eos_token_id": list(ends)}, indent=2) + "\n")


def _check_tensors(spec: ModelSpec, stored: dict[str, StoredTensor]) -> None:
    """Check that the folder has every parameter with the shape that config.json implies, and no other tensor."""
    field, family = f"{spec.role}.path", FAMILIES[spec.shape.family]
    known = {parameter.name for parameter in parameters(spec)} | UNUSED
    for name in stored:
        if name not in known and not name.endswith(".rotary_emb.inv_freq"):
            raise InvalidInput(field, f"tensor {name} in {spec.path}", f"only parameters of {family.name}")
    for name, shape in ((parameter.name, parameter.shape) for parameter in parameters(spec)):
        if name == "score.weight" and name not in stored:
            if not spec.new_head:
                other = "new_head: true; a model that generates needs head: lm"
                raise InvalidInput(field, spec.path, f"a checkpoint with a scalar head (score.weight), or {other}")
        elif name not in stored:
            raise InvalidInput(field, f"no tensor {name} in {spec.path}", "a checkpoint with this tensor")
        elif stored[name].shape != shape:
            seen = f"{name} of shape {stored[name].shape} in {spec.path}"
            raise InvalidInput(field, seen, f"shape {shape}, as config.json says")
    tied = "lm" in spec.head and spec.shape.tied_embeddings and "lm_head.weight" in stored
    if tied and not equal_bytes(stored["lm_head.weight"], stored["model.embed_tokens.weight"]):
        seen = f"lm_head.weight unlike model.embed_tokens.weight in {spec.path}"
        raise InvalidInput(field, seen, "equal tensors, or tie_word_embeddings: false in config.json")


def _config_of(spec: ModelSpec, tokenizer: Path, ends: Sequence[int] | None = None) -> dict[str, Any]:
    """Make config.json: the model's own file, with its head, its format and the tokenizer's ids replaced.

    A scalar head has no `pad_token_id` that is one of the `ends`: at the end of a text, transformers takes such a token
    for padding and returns the score of the token before, where a run has the score of the end.
    """
    folder = model_folder(spec.path, f"{spec.role}.path", "config")
    source = _stored_config(folder) or _plain_config(spec)
    ids = {key: value for key, value in _stored_config(tokenizer).items() if key in TOKEN_IDS}
    formats = {"dtype": spec.dtype, "torch_dtype": spec.dtype}  # the second for transformers 4
    head: dict[str, Any] = {"architectures": [FAMILIES[spec.shape.family].architecture(spec.head)]}
    labels = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    if spec.head == "scalar" and len(source.get("id2label") or ()) != 1:
        head |= labels
    if spec.head == "scalar" and "num_labels" in source:
        head["num_labels"] = 1
    made = source | ids | formats | _rope_of_version_4(spec.shape) | head
    eos = made.get("eos_token_id")
    known_ends = {*(ends or ()), *(eos if isinstance(eos, list) else [eos])} - {None}
    if spec.head == "scalar" and made.get("pad_token_id") in known_ends:
        made["pad_token_id"] = None
    return made


def _rope_of_version_4(shape: TransformerShape) -> dict[str, Any]:
    """Return a shape's rotary settings under the keys that transformers 4 reads.

    Neither it nor converters (to GGUF, to CTranslate2) read `rope_parameters`. Without these keys they take their own
    defaults, and compute another model without a word. transformers 5 and vLLM get the same values from either.
    """
    keys: dict[str, Any] = {"rope_theta": shape.rope_theta}
    if (scaling := shape.rope_scaling) is not None:
        keys["rope_scaling"] = {"rope_type": "llama3"} | _llama3(scaling)
    if FAMILIES[shape.family].local_layers is not None:
        patterns = range(1, shape.num_layers + 2)
        every = next((n for n in patterns if kinds_of_layers(n, shape.num_layers) == _kinds(shape)), None)
        keys |= {"rope_local_base_freq": shape.window.rope_theta} if shape.window is not None else {}
        keys |= {"sliding_window_pattern": every} if every is not None else {}
    return keys


def _kinds(shape: TransformerShape) -> list[str]:
    """Return a shape's `layer_types`."""
    local = shape.window.layers if shape.window is not None else ()
    return [LOCAL if layer in local else WHOLE for layer in range(shape.num_layers)]


def _llama3(scaling: RopeScaling) -> dict[str, float]:
    factors = {key: getattr(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    return factors | {"original_max_position_embeddings": scaling.original_context}


def _stored_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json; empty without such a file."""
    file = folder / "config.json"
    return read_json_object("config.json", file) if file.is_file() else {}


def _plain_config(spec: ModelSpec) -> dict[str, Any]:
    """Make a config.json from a shape, for a model without such a file."""
    shape, family = spec.shape, FAMILIES[spec.shape.family]
    rope: dict[str, Any] = {"rope_theta": shape.rope_theta, "rope_type": "default"}
    if (scaling := shape.rope_scaling) is not None:
        rope |= {"rope_type": "llama3"} | _llama3(scaling)
    local: dict[str, Any] = {}
    if (window := shape.window) is not None:
        rope = {WHOLE: rope, LOCAL: {"rope_theta": window.rope_theta, "rope_type": "default"}}
        local = {"sliding_window": window.tokens, "layer_types": _kinds(shape)}
    if "query_pre_attn_scalar" in family.reads:
        local["query_pre_attn_scalar"] = shape.score_width or shape.head_dim
    return {
        "model_type": family.model_type,
        **family.only,
        **local,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": rope,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tied_embeddings,
        **family.written,
    }
