"""A model folder's tokenizer, loaded once per process."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.sampling.chats.pieces import FILE, has_pieces_alone, is_misread, read_as_pieces, stated
from prefect_rlhf.errors.errors import refusing
from prefect_rlhf.files.hub.hub_path import shown_folder
from prefect_rlhf.files.model_folder import TOKENIZER_CONFIG
from prefect_rlhf.files.storage.inputs import model_folder

_BYTES = "ByteLevel"  # how tokenizer.json names the spelling of GPT-2 and Llama 3
_PLAIN = "PreTrainedTokenizerFast"  # the class that does what tokenizer.json says
_NAMED = ("bos_token", "eos_token", "unk_token")
_IS_SET = "_chat_template_is_set"  # an attribute of a tokenizer whose template is not that of its folder


def tokenizer_of(folder: str, field: str = "play", seen: str = "a play", template: str | None = None) -> Any:
    """Return a model folder's tokenizer; `template`, the text of a chat template, replaces its own.

    Raises InvalidInput, about `field`, for a folder without a tokenizer.
    """
    expected = f"a tokenizer in the model folder {folder}, to decode its tokens"
    local = model_folder(folder, field, "tokenizer")
    with refusing(Exception, field, seen, expected):  # for any error, a person must change the file
        return loaded(str(local), template)


@lru_cache(maxsize=4)
def loaded(folder: str, template: str | None = None) -> Any:
    """Load a tokenizer from a folder on this machine, with this chat template if given.

    Raises any error of transformers.
    """
    from transformers import AutoTokenizer  # only here: it takes seconds to import

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if _drops_spaces(tokenizer, folder):
        tokenizer = _by_its_file(folder)
    if has_pieces_alone(folder):
        tokenizer = read_as_pieces(tokenizer, folder)
    if template is not None:
        tokenizer.chat_template = template
        setattr(tokenizer, _IS_SET, True)
    return tokenizer


def corrected_files(folder: str) -> Mapping[str, str]:
    """Return an export's text for tokenizer files that transformers 5 would misread; empty if it reads them right.

    Other versions and vLLM then read them as `loaded` reads the folder.
    """
    content = stated(folder)
    if has_pieces_alone(folder):
        tokenizer = loaded(folder)
        if not is_misread(folder, tokenizer):
            return {}
        named = {name: str(token) for name in _NAMED if (token := getattr(tokenizer, name)) is not None}
        content = named | content | {"add_bos_token": tokenizer.add_bos_token}
    elif Path(folder, FILE).is_file() and str(content.get("tokenizer_class")).startswith("LlamaTokenizer"):
        tokenizer = loaded(folder)
        if type(tokenizer).__name__.startswith("LlamaTokenizer"):
            return {}
    else:
        return {}
    config = json.dumps(content | {"tokenizer_class": _PLAIN}, indent=2, ensure_ascii=False)
    return {FILE: tokenizer.backend_tokenizer.to_str(pretty=True), TOKENIZER_CONFIG: f"{config}\n"}


def for_version_4(content: Mapping[str, Any], template: str | None) -> dict[str, Any]:
    """Return a tokenizer_config.json that transformers 4 reads as version 5 reads the given one.

    Version 4 does not know the class TokenizersBackend, and fails at a list of extra_special_tokens. 4.44 and several
    servers find no chat template in a file of its own, whose text is `template`.

    >>> for_version_4({"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]}, None)
    {'tokenizer_class': 'PreTrainedTokenizerFast', 'additional_special_tokens': ['<a>']}
    """
    older = dict(content)
    if older.get("tokenizer_class") == "TokenizersBackend":
        older["tokenizer_class"] = _PLAIN
    if isinstance(older.get("extra_special_tokens"), list):
        extra = older.pop("extra_special_tokens")
        older["additional_special_tokens"] = extra or older.get("additional_special_tokens", [])
    return older if template is None else older | {"chat_template": template}


def _drops_spaces(tokenizer: Any, folder: str) -> bool:
    """Whether tokenizer.json spells bytes as letters, and transformers made a tokenizer that does not.

    transformers 5 does so if tokenizer_config.json names LlamaTokenizerFast, as in DeepSeek's R1 distillates of Llama:
    all spaces are lost. It knows these by their names on the Hub, not in a folder (transformers, issue 45488).
    """
    file, backend = Path(folder, FILE), getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not file.is_file() or _BYTES in repr(backend.decoder):
        return False
    if f'"{_BYTES}"'.encode() not in file.read_bytes():  # to parse Gemma's file takes a second
        return False
    from tokenizers import Tokenizer

    return _BYTES in repr(Tokenizer.from_file(str(file)).decoder)


def _by_its_file(folder: str) -> Any:
    """Load a tokenizer as transformers 4 does: tokenizer.json, with the beginning and end that the config states."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    content = stated(folder)
    tokenizer.add_bos_token = content.get("add_bos_token", True)
    tokenizer.add_eos_token = content.get("add_eos_token", False)
    return tokenizer


def template_name(tokenizer: Any) -> str:
    """Return the name of a tokenizer's chat template for messages: its folder, or the setting that it comes from."""
    if hasattr(tokenizer, _IS_SET):
        return "the setting chat_template"
    return f"the chat template of {shown_folder(tokenizer.name_or_path)}"


def template_source(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat template, or of all its templates; empty without a template."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""


def lacks_template(tokenizer: Any) -> str | None:
    """Return why a tokenizer cannot write a chat, as the end of `a tokenizer that has a chat template`; None if it can.

    Of several templates by name, transformers takes `default`, or `tool_use` for a chat with tools.
    """
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        return None if "default" in template else f" named default, not only {', '.join(sorted(template))}"
    return None if template else ""
