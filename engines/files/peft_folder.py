"""PEFT folders: an adapter's settings and tensors, as `peft` writes them. Reading the settings needs no torch.

A folder has adapter_config.json and adapter_model.safetensors. Its tensors have our names behind a prefix.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.files.tensor_files import OpenTensors, StoredTensor, equal_bytes, stored_tensors
from prefect_rlhf.errors.errors import InvalidInput, refusing
from prefect_rlhf.files.foreign_file import read_content, read_json_object
from prefect_rlhf.files.hub.hub_path import commit_of
from prefect_rlhf.files.model_folder import (
    ADAPTER,
    ADAPTER_TENSORS,
    APART,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    is_adapter,
)
from prefect_rlhf.files.remote_path import is_remote
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.families.known import FAMILIES
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import adapted_weights, matrix_name, parts

PREFIX = "base_model.model."
HEAD = "score.weight"  # of a reward model; peft saves it whole
HEAD_NAMES = {"score", "classifier"}  # peft has both names for such heads
PLAIN: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "bias": (("none",), "'none': only the matrices are trained here"),
    "fan_in_fan_out": ((False, None), "false"),
    "use_dora": ((False, None), "false: DoRA is not computed here"),
    "init_lora_weights": (
        (True, False, "gaussian", "eva", "orthogonal", "mica"),
        "a plain adapter; this kind changes its base: convert it with path_initial_model_for_weight_conversion",
    ),
    "rank_pattern": (({}, None), "no pattern: all matrices have the same rank"),
    "alpha_pattern": (({}, None), "no pattern: all matrices have the same alpha"),
    "layers_to_transform": ((None, []), "null: every layer has the adapter"),
    "lora_bias": ((False, None), "false"),
}
"""Values of adapter_config.json that leave an adapter plain, by key, and what to use instead of other values."""
READ = {
    *("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "modules_to_save"),
    *("base_model_name_or_path", "revision"),
}
WITHOUT_EFFECT = {
    *("target_modules", "exclude_modules", "layers_pattern"),  # the tensors show their choice
    *("lora_dropout", "inference_mode", "eva_config", "corda_config", "lora_ga_config", "loftq_config"),  # of training
    *("peft_version", "auto_mapping", "megatron_config", "megatron_core", "qalora_group_size"),
    *("ensure_weight_tying", "runtime_config"),
}
_NAME = re.compile(rf"{re.escape(PREFIX)}model\.layers\.\d+\.(?P<matrix>.+)\.lora_[AB]\.weight")
_log = logging.getLogger(__name__)


def read_adapter(
    spec: ModelSpec, path: str | Path, stated: Mapping[str, Any], say: Callable[[str], None] = _log.warning
) -> AdapterSpec:
    """Return the adapter in the PEFT folder `path`, which may be remote, for `spec`'s model, its base.

    `stated` are the AdapterSpec fields that you gave; the folder must agree with them. `say` gets a line if dropout is
    left out, if only shapes show that the base is right, and if the folder has another chat template than the base.

    Raises InvalidInput, with field `<role>.adapter.path` or `<role>.adapter.<field>`, for another kind of folder, and
    for an adapter of another base.
    """
    field = f"{spec.role}.adapter.path"
    folder = model_folder(str(path), field, "adapter")
    tensors = _tensors(folder, field)
    config = read_json_object(field, folder / ADAPTER, f"a JSON object in {ADAPTER}")
    _check_kind(config, spec, f"{field}: {ADAPTER}")
    rank, alpha = _rank_and_alpha(config, f"{field}: {ADAPTER}")
    place = str(path) if is_remote(str(path)) else str(folder)
    found = AdapterSpec(rank, alpha, _matrices(tensors, spec, field), bool(config.get("use_rslora")), place)
    for name, value in stated.items():
        own = getattr(found, name)
        if (set(value) != set(own)) if name == "matrices" else value != own:
            raise InvalidInput(f"{spec.role}.adapter.{name}", value, f"{_in_words(own)}, as in {path}, or no value")
    _check_shapes(tensors, replace(spec, adapter=found), field)
    _check_base(config, spec, field, say)
    _compare_templates(folder, spec, field, say)
    if config.get("lora_dropout"):
        say(f"{field}: the adapter was trained with dropout {config['lora_dropout']}; here it has no dropout")
    return found


def open_adapter(path: str | Path, field: str) -> OpenTensors:
    """Open a PEFT folder's tensors under our names: A, B, and perhaps a scalar head."""
    folder = model_folder(str(path), field, "adapter")
    files = (ADAPTER_TENSORS, *((APART,) if (folder / APART).is_file() else ()))
    return OpenTensors(str(folder), field, files, PREFIX)


def _tensors(folder: Path, field: str) -> dict[str, StoredTensor]:
    """Read the tensors' headers, under the names that the folder has."""
    if not is_adapter(folder):
        raise InvalidInput(field, str(folder), f"a folder that peft wrote, with {ADAPTER}")
    if not (folder / ADAPTER_TENSORS).is_file():
        unsafe = "; torch's own file (.bin) may run code when it is read" if any(folder.glob("*.bin")) else ""
        raise InvalidInput(field, f"no file {ADAPTER_TENSORS} in {folder}", f"a folder that peft wrote with it{unsafe}")
    return stored_tensors(folder, field, (ADAPTER_TENSORS,))


def _check_kind(config: Mapping[str, Any], spec: ModelSpec, field: str) -> None:
    """Raise InvalidInput unless a config is a plain LoRA adapter's, perhaps with a scalar head."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InvalidInput(f"{field}: peft_type", kind, "LORA")
    for key, (values, expected) in PLAIN.items():
        if key in config and config[key] not in values:
            raise InvalidInput(f"{field}: {key}", config[key], expected)
    saved = config.get("modules_to_save") or []
    head = HEAD_NAMES if "scalar" in spec.head else set()
    if not isinstance(saved, list) or not head.issuperset(map(str, saved)):
        expected = f"no module, or {' and '.join(sorted(head))}" if head else "no module: only the adapter is trained"
        raise InvalidInput(f"{field}: modules_to_save", saved, expected)
    for key in sorted(config.keys() - READ - WITHOUT_EFFECT - PLAIN.keys()):
        if config[key]:
            raise InvalidInput(f"{field}: {key}", config[key], "null or false: only plain LoRA adapters")


def _rank_and_alpha(config: Mapping[str, Any], field: str) -> tuple[int, float]:
    rank, alpha, rslora = (config.get(key) for key in ("r", "lora_alpha", "use_rslora"))
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise InvalidInput(f"{field}: r", rank, "a whole number above 0")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise InvalidInput(f"{field}: lora_alpha", alpha, "a number above 0")
    if rslora not in (True, False, None):
        raise InvalidInput(f"{field}: use_rslora", rslora, "true or false")
    return rank, float(alpha)


def _matrices(tensors: Mapping[str, StoredTensor], spec: ModelSpec, field: str) -> tuple[str, ...]:
    """Return the adapted matrices, in the order of a layer. Raises InvalidInput for any other tensor."""
    family = FAMILIES[spec.shape.family]
    known = {weight.name: matrix_name(weight) for weight in adapted_weights(spec.shape)}
    of_head = {PREFIX + HEAD} if "scalar" in spec.head else set()
    found = set()
    for name in tensors.keys() - of_head:
        match = _NAME.fullmatch(name)
        if match is None or match["matrix"] not in known:
            right = f"only A and B of {', '.join(known.values())} in the layers of {family.name}"
            raise InvalidInput(field, f"tensor {name}", right)
        found.add(match["matrix"])
    return tuple(own for name, own in known.items() if name in found)


def _check_shapes(tensors: Mapping[str, StoredTensor], spec: ModelSpec, field: str) -> None:
    expected = {parameter.name: parameter.shape for parameter in parts(spec)["adapter"]}
    if PREFIX + HEAD in tensors:
        expected[HEAD] = (1, spec.shape.hidden_size)
    for name, shape in expected.items():
        if (stored := tensors.get(PREFIX + name)) is None:
            raise InvalidInput(field, f"no tensor {PREFIX}{name}", "a folder with the same matrices in every layer")
        if stored.shape != shape:
            seen = f"{name} of shape {stored.shape}"
            why = "a head of one number" if name == HEAD else f"as {spec.path} and r in {ADAPTER} say"
            raise InvalidInput(field, seen, f"shape {shape}, {why}")
    known = {PREFIX + name for name in expected}
    for name in sorted(tensors.keys() - known):
        raise InvalidInput(field, f"tensor {name}", f"{spec.shape.num_layers} layers, as {spec.path} has")


def _check_base(config: Mapping[str, Any], spec: ModelSpec, field: str, say: Callable[[str], None]) -> None:
    """Raise InvalidInput if the base that a config names is on this machine and another model than the role's."""
    named, path = config.get("base_model_name_or_path"), f"{spec.role}.path"
    theirs_at, ours_at = config.get("revision"), commit_of(spec.path)
    if not isinstance(named, str) or not named or not spec.content:  # a model without content is only planned
        return
    if not Path(named, "config.json").is_file():
        if Path(named).name != Path(spec.path).name and named.replace("/", "--") not in spec.path.replace("/", "--"):
            say(f"{field}: trained on {named}; only shapes show that {spec.path} is the same model")
        elif ours_at and isinstance(theirs_at, str) and len(theirs_at) == len(ours_at) and theirs_at != ours_at:
            say(f"{field}: trained on {named}@{theirs_at}; {path} is at commit {ours_at}")
        return
    theirs, ours = stored_tensors(Path(named), field), stored_tensors(model_folder(spec.path, path), path)
    last = f"model.layers.{spec.shape.num_layers - 1}."
    for name in ("model.norm.weight", *(name for name in sorted(ours) if name.startswith(last))):
        if name not in theirs or not equal_bytes(theirs[name], ours[name]):
            right = f"an adapter of {spec.path}, or {path}={named}"
            raise InvalidInput(field, f"an adapter of {named}, which has another {name}", right)


def _compare_templates(folder: Path, spec: ModelSpec, field: str, say: Callable[[str], None]) -> None:
    """Tell the user if an adapter and its base have different chat templates. Trainers save theirs with the adapter."""
    if spec.chat_template is not None or "lm" not in spec.head or not spec.content:
        return
    base = f"{spec.role}.path"
    own, of_base = _stored_template(folder, field), _stored_template(model_folder(spec.path, base), base)
    if own is not None and own != of_base:
        place = folder / TEMPLATE_FILE if (folder / TEMPLATE_FILE).is_file() else "a file with it"
        say(
            f"{field}: its folder has another chat template than {spec.path}, whose template is used;"
            f" if the adapter was trained with its own, set {spec.role}.chat_template={place}"
        )


def _stored_template(folder: Path, field: str) -> str | None:
    """Return a folder's chat template; None without one, and if it has several by name."""
    if (file := folder / TEMPLATE_FILE).is_file():
        with refusing(OSError, field, str(file), "a chat template that can be read"):
            return read_content(file).decode(errors="replace").strip()
    file = folder / TOKENIZER_CONFIG
    found = read_json_object(field, file).get("chat_template") if file.is_file() else None
    return found.strip() if isinstance(found, str) else None


def _in_words(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
