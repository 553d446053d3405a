"""A Hugging Face folder as an engine's shards need it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open

from prefect_rlhf.engines.engine import Shard
from prefect_rlhf.placement.errors import InvalidInput


def load(path: str, shards: Mapping[str, Shard]) -> None:
    """Copy each shard's region out of the folder's safetensors files, reading nothing else."""
    missing = dict(shards)
    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in missing.keys() & tensors.keys():
                shard = missing.pop(name)
                part = tensors.get_slice(name)[tuple(slice(*bounds) for bounds in shard.region)]
                shard.view.copy_(part.view(shard.view.shape))
    if missing:
        raise InvalidInput("model.path", path, f"a checkpoint with the weight {min(missing)}")


def eos_token_ids(path: str) -> tuple[int, ...]:
    """The end-of-sequence tokens that the folder names: those of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        file = Path(path, name)
        ids = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
