"""Checks before a device is used that frozen models did not change since the checkpoint, by a few matrices of each.

A checkpoint has the fingerprint of every parameter. Each model is compared as a whole when it is built.
"""

from __future__ import annotations

from prefect_rlhf.engines.files.tensor_files import OpenTensors
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.installed import installed_version
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.placement.graph import DataflowGraph
from prefect_rlhf.placement.models.weights import Parameter, Weights
from prefect_rlhf.tasks.checkpoints.folders import PARAMETER, Checkpoint


def check_frozen_models(checkpoint: Checkpoint, graph: DataflowGraph) -> None:
    """Raise InvalidInput if a reference, reward model or base has other weights than in the checkpoint.

    Moving a folder or splitting its files differently makes no difference. PEFT folders and four-bit bases are compared
    only when they are built. Without torch no model is compared, but then no run can start either.
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


def _check(own: Weights, saved: dict[str, int]) -> None:
    import torch  # only here: a dry run without torch reads checkpoints

    from prefect_rlhf.engines.engine import Shard
    from prefect_rlhf.engines.weights.fingerprint import digest

    assert own.made_of is not None
    model, _ = own.made_of
    field = f"{model.role}.path"
    with OpenTensors(str(model_folder(model.path, field)), field) as stored:
        for parameter in small_matrices(own):
            if parameter.name in stored and parameter.name in saved:  # not in a model with a new head, for example
                region = tuple((0, size) for size in parameter.shape)
                values = stored.read(parameter.name, region).to(getattr(torch, model.dtype))
                if digest({parameter.name: Shard(region, values)})[parameter.name] != saved[parameter.name]:
                    raise other_weights(model.role, model.path)


def small_matrices(own: Weights) -> list[Parameter]:
    """Return the smallest matrix of the first and of the last layer; for weights without layers, their smallest
    matrix.
    """
    matrices = [parameter for parameter in own.parameters if len(parameter.shape) == 2]
    layers = {parameter.layer for parameter in matrices if parameter.layer is not None}
    ends = sorted({min(layers), max(layers)}) if layers else [None] * bool(matrices)
    return [
        min((parameter for parameter in matrices if parameter.layer == end), key=lambda each: each.num_elements)
        for end in ends
    ]
