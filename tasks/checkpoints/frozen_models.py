"""Checks before a device is used that frozen models did not change since the checkpoint, by a few matrices of each.

A checkpoint has the fingerprint of every parameter. Each model is compared as a whole when it is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from prefect_rlhf.engines.files.quantized_base import read_quantized
from prefect_rlhf.engines.files.tensor_files import OpenTensors
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.installed import installed_version
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import Parameter, Weights, parts, quantized_matrices
from prefect_rlhf.tasks.checkpoints.folders import PARAMETER, Checkpoint

if TYPE_CHECKING:
    from torch import Tensor


def check_frozen_models(checkpoint: Checkpoint, graph: DataflowGraph) -> None:
    """Raise InvalidInput if a reference, reward model or base has other weights than in the checkpoint.

    Moving a folder or splitting its files differently makes no difference. PEFT folders are compared only when they
    are built. Without torch no model is compared, but then no run can start either.
    """
    if installed_version("torch") is None:
        return
    for own in graph.all_weights():
        saved = checkpoint.manifest.fingerprints.get(own.name)
        if saved and not own.trained and own.made_of and own.part != "adapter":
            _check(own, saved)


def other_weights(role: str, path: str) -> InvalidInput:
    """Return the error for a frozen model that has other weights than in the run that wrote the checkpoint."""
    return InvalidInput(
        PARAMETER, f"a checkpoint of a run with other weights of {role}", f"the weights in {path}, as in this run"
    )


def _check(own: Weights, saved: Mapping[str, int]) -> None:
    from prefect_rlhf.engines.engine import Shard  # only here: a dry run without torch reads checkpoints
    from prefect_rlhf.engines.weights.fingerprint import digest

    assert own.made_of is not None
    model, _ = own.made_of
    field = f"{model.role}.path"
    with OpenTensors(str(model_folder(model.path, field)), field) as stored:
        for matrix in small_matrices(own):
            if matrix.name in stored and matrix.name in saved:  # not in a model with a new head, for example
                content = _content(matrix, model, stored)
                shards = {name: Shard(tuple((0, n) for n in each.shape), each) for name, each in content.items()}
                if any(saved.get(name) != value for name, value in digest(shards).items()):
                    raise other_weights(model.role, model.path)


def _content(matrix: Parameter, model: ModelSpec, stored: OpenTensors) -> dict[str, Tensor]:
    """Return the tensors that a model has of a folder's matrix, by their names."""
    import torch

    if matrix in quantized_matrices(model):
        return read_quantized(matrix, model.dtype, stored)
    region = tuple((0, size) for size in matrix.shape)
    return {matrix.name: stored.read(matrix.name, region).to(getattr(torch, model.dtype))}


def small_matrices(own: Weights) -> list[Parameter]:
    """Return the smallest matrix of the first and of the last layer; for weights without layers, their smallest.

    They are as in the model's folder, where none has four bits.
    """
    assert own.made_of is not None
    model, part = own.made_of
    matrices = [each for each in parts(replace(model, base_dtype=None))[part] if len(each.shape) == 2]
    layers = {parameter.layer for parameter in matrices if parameter.layer is not None}
    ends = sorted({min(layers), max(layers)}) if layers else [None] * bool(matrices)
    return [
        min((parameter for parameter in matrices if parameter.layer == end), key=lambda each: each.num_elements)
        for end in ends
    ]
