"""The shape of a model that need not be there: by a known name, or from the config.json of a folder."""

from __future__ import annotations

from pathlib import Path

from prefect_rlhf.engines.files.huggingface import read_model_spec, read_shape
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.model import KNOWN_SHAPES, TransformerShape

__all__ = ["model_shape", "read_model_spec"]


def model_shape(role: str, name: str) -> TransformerShape:
    """The shape that `name` stands for. Raises InvalidInput for one that stands for none.

    >>> model_shape("actor", "llama-7b").num_layers
    32
    """
    if name in KNOWN_SHAPES:
        return KNOWN_SHAPES[name]
    if not Path(name).exists():
        raise InvalidInput(f"models.{role}", name, f"a Hugging Face folder, or one of {', '.join(KNOWN_SHAPES)}")
    return read_shape(role, name)
