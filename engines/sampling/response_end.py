"""The end of a response: at which tokens, and after how many; the same for every engine that generates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect_rlhf.engines.engine import SamplingSettings
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.foreign_file import read_json_object


def end_tokens(path: str) -> tuple[int, ...]:
    """Read the end-of-sequence tokens that the folder names: those of generation_config.json, else of config.json.

    Raises InvalidInput for a file that names none and is no JSON object, and for tokens that are no whole numbers.
    """
    for name in ("generation_config.json", "config.json"):
        file = Path(path, name)
        ids = read_json_object(name, file).get("eos_token_id") if file.is_file() else None
        if ids is None:
            continue
        tokens = ids if isinstance(ids, list) else [ids]
        if not all(type(token) is int for token in tokens):
            raise InvalidInput(f"{file}: eos_token_id", ids, "a token's number, or a list of such")
        return tuple(tokens)
    return ()


def check_lengths(prompts: Sequence[Sequence[int]], sampling: SamplingSettings, max_length: int) -> None:
    """Raise InvalidInput unless each prompt has a token and leaves room for its response."""
    shortest, longest = min(map(len, prompts), default=1), max(map(len, prompts), default=0)
    if shortest == 0:
        raise InvalidInput("prompt tokens", shortest, "at least 1")
    limit = max_length - sampling.max_new_tokens
    if longest > limit:
        expected = f"at most {limit} of {max_length}, before {sampling.max_new_tokens} new ones"
        raise InvalidInput("prompt tokens", longest, expected)
