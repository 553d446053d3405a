"""Strings that end a response: found in what the newest tokens spell, the same for every engine that generates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from prefect_rlhf.placement.errors import InvalidInput

MARGIN = 8  # tokens before the longest string, which may hold a part of a character, or lose the space before a word


class StopStrings:
    """Strings in the words of a model folder's tokenizer; special tokens are spelt out.

    A response ends with the token that completes one of them. That token stays, with what it spells beyond the string,
    so that tokens and log-probabilities remain those that were drawn.
    """

    def __init__(self, strings: Sequence[str], folder: str) -> None:
        self._strings, self._tokenizer = tuple(strings), _tokenizer(folder)
        self.window = max(len(string.encode()) for string in self._strings) + MARGIN

    def ended(self, responses: Sequence[Sequence[int]]) -> list[bool]:
        """Return whether each response has one of the strings in its latest `window` tokens, each a byte at least."""
        latest = [list(response[-self.window :]) for response in responses]
        texts = self._tokenizer.batch_decode(latest, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return [any(string in text for string in self._strings) for text in texts]


def stop_strings(strings: Sequence[str], folder: str) -> StopStrings | None:
    """Return what finds them, or None where there are none. Raises InvalidInput for a folder without a tokenizer."""
    return StopStrings(strings, folder) if strings else None


@lru_cache(maxsize=4)
def _tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer  # only here: most runs have no such strings

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # noqa: BLE001  whatever it dislikes about the file, the person must change the file
        expected = f"a tokenizer beside the model {folder}, which spells its tokens ({error!s:.120})"
        raise InvalidInput("sampling.stop", "strings", expected) from error
