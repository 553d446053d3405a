"""Models as flows read them, without importing an engine: from a folder's config.json, or by a known name."""

from prefect_rlhf.engines.files.huggingface import read_content, read_shape
from prefect_rlhf.engines.files.huggingface import read_model_spec as read_model_spec
from prefect_rlhf.engines.files.peft_folder import read_adapter as read_adapter
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.hub.hub_path import is_name
from prefect_rlhf.files.path_text import checked_path
from prefect_rlhf.files.remote_path import is_remote
from prefect_rlhf.placement.models.known_models import find_shape, known_shape
from prefect_rlhf.placement.models.model import TransformerShape


def model_shape(role: str, name: str) -> TransformerShape:
    """Return the shape of the model `name`: a folder, a short name, or an id on the Hub.

    Raises InvalidInput for an unknown name.

    >>> model_shape("actor", "llama-7b").num_layers
    32
    """
    if _is_read(role, name):
        return read_shape(role, name)
    return known_shape(name, f"models.{role}", otherwise="a Hugging Face folder, or ")


def model_content(role: str, name: str) -> str:
    """Return the key for the weights of the model `name`, as a run has it; empty for a short name."""
    return read_content(role, name) if _is_read(role, name) else ""


def _is_read(role: str, name: str) -> bool:
    folder = checked_path(f"models.{role}", name)
    is_other = find_shape(name) is None and (folder.exists() or is_name(name))  # a known name needs no request
    return is_remote(name) or is_other or (folder / "config.json").is_file()


def runnable_shape(role: str, name: str) -> TransformerShape:
    """Return the shape of a model that our engines can run. Raises InvalidInput for a model that can only be
    planned.
    """
    shape = model_shape(role, name)
    if shape.not_run:
        raise InvalidInput(f"models.{role}", name, f"a model that our engines run: not {shape.not_run}")
    return shape
