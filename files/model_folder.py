"""The kind of model in a folder: whether it generates or gives scores."""

from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import read_json_object

CONFIG = "config.json"
RESULT = "result.json"  # of a run's folder
ADAPTER, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a PEFT folder."""
TEMPLATE_FILE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""A chat template is in the first, or in the second under `chat_template`."""
TEMPLATES = "additional_chat_templates"
"""A folder of further chat templates by name, such as `tool_use.jinja`."""
APART = "scalar_head.safetensors"
"""A file of ours beside a model or an adapter that has both heads. No index names it, so others ignore it."""
MERGED = "_merged"  # behind the name of an adapter's folder, of the folder of the whole model
SCORES = "ForSequenceClassification"


def is_adapter(folder: Path) -> bool:
    """Whether a folder has only an adapter."""
    return (folder / ADAPTER).is_file()


def generates(folder: Path) -> bool:
    """Whether a folder has a generative model, judging by the class in its config.json. False without such a file."""
    try:
        named = read_json_object(CONFIG, folder / CONFIG).get("architectures")
    except InvalidInput:
        return False
    return not any(str(name).endswith(SCORES) for name in (named if isinstance(named, list) else ()))
