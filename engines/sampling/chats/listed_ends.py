"""The end-of-sequence tokens that the files of a model folder list."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import read_json_object


def listed_ends(path: str | Path) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of generation_config.json, or else of config.json.

    Raises InvalidInput for a file that is not a JSON object and for tokens that are not whole numbers.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(path, name)
        ids = read_json_object(name, file).get("eos_token_id") if file.is_file() else None
        if ids is None:
            continue
        tokens: Sequence[Any] = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int for token in tokens):
            raise InvalidInput(f"{file}: eos_token_id", ids, "a token id, or a list of token ids")
        return tuple(tokens)
    return ()
