"""Each token id's text, from a tokenizer's files; two tokenizers agree on an id if its texts are equal.

Tokenizers spell the same bytes differently (`Ġthe`, `▁the`), so names that differ are compared as bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.foreign_file import read_json
from prefect_rlhf.files.storage.inputs import model_folder
from prefect_rlhf.tasks.data.tokenizer import load_tokenizer

JSON, SENTENCEPIECE = "tokenizer.json", "tokenizer.model"
SPACE = "\u2581"  # how sentencepiece writes a space
SPELLING_PARTS = ("normalizer", "pre_tokenizer", "decoder")  # of tokenizer.json: they say how names spell bytes


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Each token id's name. An id in `added` is written as its text; `is_byte_level` means GPT-2's spelling."""

    names: Mapping[int, str]
    added: frozenset[int]
    is_byte_level: bool

    def text(self, token: int) -> bytes | None:
        """Return a token's bytes; None for an id that the tokenizer does not have.

        >>> Vocabulary({0: "\u0120caf\u00c3\u00a9"}, frozenset(), is_byte_level=True).text(0).decode()
        ' caf\u00e9'
        >>> Vocabulary({0: "\u2581the", 1: "<0x0A>"}, frozenset(), is_byte_level=False).text(1)
        b'\\n'
        """
        name = self.names.get(token)
        if name is None or token in self.added:
            return None if name is None else name.encode()
        if self.is_byte_level:
            known = byte_of_letter()
            return bytes(map(known.__getitem__, name)) if known.keys() >= set(name) else name.encode()
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes.fromhex(name[3:5])
        return name.replace(SPACE, " ").encode()

    def under(self, size: int) -> Vocabulary:
        """Return the part with ids that fit an embedding of `size` entries."""
        if max(self.names, default=0) < size:
            return self
        return replace(self, names={token: name for token, name in self.names.items() if token < size})

    def first_difference(self, other: Vocabulary) -> int | None:
        """Return the lowest id of this vocabulary with a different text in `other`, or None."""
        same_spelling = self.is_byte_level == other.is_byte_level
        differs = (
            token
            for token, name in sorted(self.names.items())
            if not (same_spelling and other.names.get(token) == name) and self.text(token) != other.text(token)
        )
        return next(differs, None)


def tokenizer_folder(path: str, field: str) -> Path:
    """Return a model folder on this machine, with tokenizer files. Raises InvalidInput, at `field`."""
    return model_folder(path, field, "tokenizer")


def read_vocabulary(folder: Path, field: str) -> Vocabulary | None:
    """Read the vocabulary of a model folder on this machine; None for a folder without a tokenizer.

    Raises InvalidInput, at `field`, for a tokenizer that cannot be read.
    """
    if (folder / JSON).is_file():
        try:
            return of_json(_content(folder / JSON, field), further_tokens(folder, field))
        except (KeyError, TypeError, AttributeError) as error:
            raise _unreadable(folder / JSON, field, error) from error
    if (folder / SENTENCEPIECE).is_file():
        tokenizer = load_tokenizer(str(folder))
        if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
            return of_json(json.loads(backend.to_str()), {})
        names = {token: name for name, token in tokenizer.get_vocab().items()}
        return Vocabulary(names, frozenset(tokenizer.added_tokens_decoder), is_byte_level=False)
    return None


def has_tokenizer(folder: Path) -> bool:
    """Whether a model folder on this machine has a tokenizer."""
    return any((folder / name).is_file() for name in (JSON, SENTENCEPIECE))


def have_same_files(one: Path, other: Path, field: str) -> bool:
    """Whether two folders have byte-identical tokenizer.json files and the same further tokens.

    Comparing parsed vocabularies takes many times as long. Raises InvalidInput, at `field`, for a file that cannot be
    read.
    """
    files = one / JSON, other / JSON
    if not all(file.is_file() for file in files) or files[0].stat().st_size != files[1].stat().st_size:
        return False
    same = files[0].read_bytes() == files[1].read_bytes()
    return same and further_tokens(one, field) == further_tokens(other, field)


def of_json(content: Mapping[str, Any], further: Mapping[int, str]) -> Vocabulary:
    """Return the vocabulary in a tokenizer.json, with `further` added tokens."""
    stored = content["model"]["vocab"]
    pieces = ((piece, token) for token, (piece, _) in enumerate(stored)) if isinstance(stored, list) else stored.items()
    names = {token: name for name, token in pieces}
    added = {**further, **{token["id"]: token["content"] for token in content.get("added_tokens") or ()}}
    kinds = {kind for part in SPELLING_PARTS for kind in _kinds(content.get(part))}
    return Vocabulary({**names, **added}, frozenset(added), "ByteLevel" in kinds)


@cache
def byte_of_letter() -> Mapping[str, int]:
    """Return the byte of each letter of GPT-2's spelling: printable bytes are themselves, the others from U+0100 on."""
    itself = [*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1), *range(ord("\u00ae"), 256)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(256 + place): byte for place, byte in enumerate(others)}


def further_tokens(folder: Path, field: str) -> dict[int, str]:
    """Return the added tokens of tokenizer_config.json, which transformers adds if tokenizer.json lacks them."""
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return {}
    content = _content(file, field)
    try:
        return {int(token): one["content"] for token, one in (content.get("added_tokens_decoder") or {}).items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise _unreadable(file, field, error) from error


def _content(file: Path, field: str) -> Any:
    try:
        return read_json(file)
    except (OSError, ValueError) as error:
        raise _unreadable(file, field, error) from error


def _unreadable(file: Path, field: str, error: Exception) -> InvalidInput:
    return InvalidInput(field, str(file), f"a tokenizer that can be read ({type(error).__name__}: {error!s:.120})")


def _kinds(part: Any) -> set[str]:
    """Return the types that a part of tokenizer.json and its own parts name."""
    if isinstance(part, list):
        return {kind for one in part for kind in _kinds(one)}
    if not isinstance(part, dict):
        return set()
    return {str(part.get("type"))} | {kind for one in part.values() if isinstance(one, list) for kind in _kinds(one)}
