"""Writes a trained adapter as `peft` does, for `peft` and vLLM to load, or merges it into its base.

Shapes: r rank, O outputs and I inputs of a matrix.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect_rlhf.engines.files.huggingface import write_tokenizer
from prefect_rlhf.engines.files.peft_folder import HEAD, PREFIX
from prefect_rlhf.engines.files.quantized_base import as_in_four_bits
from prefect_rlhf.engines.files.tensor_files import OpenTensors, write_tensors
from prefect_rlhf.files.atomic_file import write_atomically
from prefect_rlhf.files.hub.hub_path import commit_of, repository_of
from prefect_rlhf.files.model_folder import ADAPTER, ADAPTER_TENSORS, APART
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.placement.models.adapter import AdapterSpec
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import Parameter, parameters, quantized_matrices, weights_of

if TYPE_CHECKING:
    from torch import Tensor


def trained_parameters(spec: ModelSpec) -> tuple[Parameter, ...]:
    """Return the parameters that the model's train_step writes; with an adapter, the adapter and a scalar head."""
    return tuple(one for own in weights_of(spec, trained=True) if own.trained for one in own.parameters)


def write_adapter(path: Path, spec: ModelSpec, tensors: Mapping[str, Tensor], tokenizer: str | Path) -> None:
    """Write a PEFT folder that `peft` and vLLM load, with the tokenizer's files.

    `tensors` are the `trained_parameters`, whole; they are written as `spec.dtype`. A scalar head is a
    module that peft saves whole. Next to a language model's head it has a file of its own, which only we read. The
    folder appears under its name only when it is complete.
    """
    adapter = spec.adapter
    assert adapter is not None  # its caller asked
    shapes = {one.name: one.shape for one in trained_parameters(spec)}
    apart = {HEAD} & shapes.keys() if spec.head == "lm+scalar" else set()
    folder_of_tokenizer = model_folder(str(tokenizer), "tokenizer", "tokenizer")

    def write(part: Path) -> None:
        part.mkdir()
        for file, names in ((ADAPTER_TENSORS, shapes.keys() - apart), (APART, apart)):
            prefix = PREFIX if file == ADAPTER_TENSORS else ""
            of_file = {prefix + name: shape for name, shape in shapes.items() if name in names}
            if of_file:
                named = ((prefix + name, tensors[name]) for name in shapes if name in names)
                write_tensors(part / file, of_file, spec.dtype, named)
        (part / ADAPTER).write_text(json.dumps(_config(spec, adapter), indent=2) + "\n")
        write_tokenizer(part, spec, folder_of_tokenizer)

    write_atomically(path, write)


def merged(spec: ModelSpec, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters of a model with its adapter merged into its base, in float32.

    The base is read from the model's folder, a tensor at a time. A base in four bits gives its dequantised numbers.
    `trained` are the `trained_parameters`.
    """
    assert spec.adapter is not None  # its caller asked
    with OpenTensors(str(model_folder(spec.path, f"{spec.role}.path")), f"{spec.role}.path") as base:
        quantized = {one.name for one in quantized_matrices(spec)}
        for one in parameters(replace(spec, adapter=None, base_dtype=None)):
            if one.name in trained:
                yield one.name, trained[one.name].float()
                continue
            whole = base.read(one.name, tuple((0, size) for size in one.shape))
            if one.name in quantized:
                whole = as_in_four_bits(whole, spec.dtype)
            whole = whole.float()
            matrix = one.name.removesuffix(".weight")
            if (a_rI := trained.get(f"{matrix}.lora_A.weight")) is not None:
                b_Or = trained[f"{matrix}.lora_B.weight"]
                whole = whole + (b_Or.float() @ a_rI.float()) * spec.adapter.scale
            yield one.name, whole


def _config(spec: ModelSpec, adapter: AdapterSpec) -> dict[str, Any]:
    """Make adapter_config.json. The base has its name on the Hub, or its folder.

    A key of a later version, such as `use_rslora`, is written only if it is on: peft 0.7 to 0.10 fail at keys that they
    do not know.
    """
    whole_alpha = int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if spec.head == "scalar" else "CAUSAL_LM",
        "base_model_name_or_path": repository_of(spec.path) or spec.content or spec.path,
        "revision": commit_of(spec.path),
        "r": adapter.rank,
        "lora_alpha": whole_alpha,
        "target_modules": list(adapter.matrices),
        "modules_to_save": [HEAD.removesuffix(".weight")] if spec.head == "scalar" else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    } | ({"use_rslora": True} if adapter.rslora else {})
