"""A run's initial adapter."""

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.engines.files.peft_folder import open_adapter
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import parts


def fill_adapter(shards: Mapping[str, Shard], spec: ModelSpec, seed: int) -> frozenset[str]:
    """Write a rank's regions of the adapter into the views among `shards`; return the names of the parameters.

    An adapter's folder may have a scalar head too. Without a folder, every plan begins with the same values, because
    each parameter is drawn as a whole and then cut.
    """
    found = {parameter.name: parameter.shape for parameter in parts(spec).get("adapter", ())}
    if spec.adapter is not None and spec.adapter.path:
        return _read_adapter(shards, spec.adapter.path, f"{spec.role}.adapter.path") | found.keys()
    with torch.no_grad():
        for name in found.keys() & shards.keys():
            shard = shards[name]
            shard.view.copy_(initial_values(name, found[name], seed)[tuple(slice(*span) for span in shard.region)])
    return frozenset(found)


def _read_adapter(shards: Mapping[str, Shard], path: str, field: str) -> frozenset[str]:
    with open_adapter(path, field) as tensors, torch.no_grad():
        stored = frozenset(name for name in shards if name in tensors)
        for name in stored:
            shards[name].view.copy_(tensors.read(name, shards[name].region).view(shards[name].view.shape))
    return stored


def initial_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return a whole parameter of a new adapter: B is zero, and A [rank, in] as PEFT draws it, in float32.

    PEFT uses Kaiming's uniform distribution with a slope of sqrt(5): from -1 / sqrt(in) to 1 / sqrt(in).
    """
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    drawn = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(drawn))
