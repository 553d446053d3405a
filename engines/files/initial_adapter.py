"""The adapter that a run begins with."""

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.placement.models.model import ModelSpec
from prefect_rlhf.placement.models.weights import parts


def fill_adapter(shards: Mapping[str, Shard], spec: ModelSpec, seed: int) -> frozenset[str]:
    """Write a rank's regions of the adapter into the views among `shards`; return the names of its parameters.

    Every plan begins with the same values: each parameter is drawn whole, and then cut.
    """
    found = {parameter.name: parameter.shape for parameter in parts(spec).get("adapter", ())}
    with torch.no_grad():
        for name in found.keys() & shards.keys():
            shard = shards[name]
            shard.view.copy_(initial_values(name, found[name], seed)[tuple(slice(*span) for span in shard.region)])
    return frozenset(found)


def initial_values(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return a whole parameter of a new adapter: B is zero, and A [rank, in] as PEFT draws it, in float32.

    PEFT takes Kaiming's uniform distribution with a slope of the root of 5: from minus to plus 1 / the root of `in`.
    """
    if name.endswith("lora_B.weight"):
        return torch.zeros(shape)
    drawn = int.from_bytes(sha256(f"{seed} {name}".encode()).digest()[:8], "little", signed=True)
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=torch.Generator().manual_seed(drawn))
