"""The end of an answer: the token that the chat template writes after it, used by data, generation and exports
alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.sampling.chats.control_tokens import control_tokens
from prefect_rlhf.engines.sampling.chats.listed_ends import listed_ends
from prefect_rlhf.engines.sampling.chats.template import ASKED, written
from prefect_rlhf.engines.sampling.chats.tokenizers import tokenizer_of
from prefect_rlhf.errors.errors import InvalidInput

_MARKER = "the words of an answer"
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
"""Files of which a folder with a tokenizer has one."""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The token that ends an answer, and its source."""

    token: int | None  # None: the tokenizer has no end
    text: str
    source: str
    written: int | None = None
    """The end that the template writes: another token than `token` if a setting overrides it, and None if it writes no
    end."""
    is_set: bool = False  # by a setting

    def __str__(self) -> str:
        """Return a line for people, such as `an answer ends with <|im_end|> (151645), from the chat template`."""
        if self.token is None:
            return "no token ends an answer: neither the chat template nor the tokenizer has an end"
        return f"an answer ends with {self.text} ({self.token}), from {self.source}"


@lru_cache(maxsize=16)
def answer_end(tokenizer: Any, eos_token: str | None = None) -> AnswerEnd:
    """Return the end of an answer: `eos_token`, or the token that the chat template writes, or the tokenizer's end.

    Raises InvalidInput for an `eos_token` that the tokenizer lacks.
    """
    closing = _closing(tokenizer, {} if eos_token is None else {"eos_token": eos_token})
    text = control_tokens(tokenizer).first_in(closing)
    in_chats = tokenizer.convert_tokens_to_ids(text) if text else None
    if eos_token is not None:
        token = _token(tokenizer, eos_token)
        return AnswerEnd(token, eos_token, "the setting eos_token", in_chats, is_set=True)
    if in_chats is not None:
        return AnswerEnd(in_chats, text, "the chat template", in_chats)
    origin = "the tokenizer: its chat template writes no end" if tokenizer.chat_template else "the tokenizer"
    return AnswerEnd(tokenizer.eos_token_id, str(tokenizer.eos_token), origin)


def check_eos_token(tokenizer: Any, eos_token: str | None, field: str) -> None:
    """Raise InvalidInput, at `field`, for a token that the tokenizer lacks."""
    if eos_token is not None and eos_token not in tokenizer.get_vocab():
        end = answer_end(tokenizer)
        such = f", such as {end.text}, which ends an answer without this setting" if end.token is not None else ""
        raise InvalidInput(field, eos_token, f"a token of the tokenizer of {tokenizer.name_or_path}{such}")


def end_tokens(path: str, eos_token: str | None = None, template: str | None = None) -> tuple[int, ...]:
    """Return the tokens that end a response of the model in a folder; the first ends an answer in its data too.

    `template`, the text of a chat template, replaces the folder's.

    Then follow the end-of-sequence tokens of generation_config.json, or else of config.json, and the tokenizer's, which
    ends a text without a template. Returns no tokens if no file names a token. Raises InvalidInput for a file that is
    not a JSON object and for tokens that are not whole numbers.
    """
    listed = listed_ends(path)
    if not any(Path(path, name).is_file() for name in TOKENIZERS):
        return listed
    tokenizer = tokenizer_of(path, "tokenizer", "the end of an answer", template)
    found = (answer_end(tokenizer, eos_token).token, *listed, tokenizer.eos_token_id)
    return tuple(dict.fromkeys(token for token in found if token is not None))


def _token(tokenizer: Any, eos_token: str) -> int:
    check_eos_token(tokenizer, eos_token, "eos_token")
    return int(tokenizer.convert_tokens_to_ids(eos_token))


def _closing(tokenizer: Any, variables: dict[str, str]) -> str:
    """Return the text that the chat template writes after the words of an answer; empty if it refuses a short chat."""
    if not tokenizer.chat_template:
        return ""
    try:
        said = {"role": "assistant", "content": _MARKER}
        text = written(tokenizer, [ASKED, said], variables=variables)
    except Exception:  # noqa: BLE001  a template is a program of the model's author
        return ""
    return text.rpartition(_MARKER)[2] if _MARKER in text else ""
