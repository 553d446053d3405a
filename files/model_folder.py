"""The folder of a model: whether the model generates or gives scores."""

from pathlib import Path

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import read_json_object

CONFIG = "config.json"
RESULT = "result.json"  # of a run's folder
SCORES = "ForSequenceClassification"


def generates(folder: Path) -> bool:
    """Return whether a folder has a model that generates: config.json names its class. False without such a file."""
    try:
        named = read_json_object(CONFIG, folder / CONFIG).get("architectures")
    except InvalidInput:
        return False
    return not any(str(name).endswith(SCORES) for name in (named if isinstance(named, list) else ()))
