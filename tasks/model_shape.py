"""Models as flows read them, which import no engine: from a folder's config.json, or a shape by its known name."""

from __future__ import annotations

from prefect_rlhf.engines.files.huggingface import read_model_spec as read_model_spec
from prefect_rlhf.engines.files.huggingface import read_shape
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.model import KNOWN_SHAPES, TransformerShape
from prefect_rlhf.placement.path_text import checked_path


def model_shape(role: str, name: str) -> TransformerShape:
    """Return the shape of the model that `name` stands for. Raises InvalidInput for a name that stands for none.

    >>> model_shape("actor", "llama-7b").num_layers
    32
    """
    if name in KNOWN_SHAPES:
        return KNOWN_SHAPES[name]
    if not checked_path(f"models.{role}", name).exists():
        raise InvalidInput(f"models.{role}", name, f"a Hugging Face folder, or one of {', '.join(KNOWN_SHAPES)}")
    return read_shape(role, name)
