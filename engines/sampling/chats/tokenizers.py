"""A model folder's tokenizer, loaded once per process."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from prefect_rlhf.errors.errors import refusing
from prefect_rlhf.files.hub.hub_path import shown_folder
from prefect_rlhf.files.storage.inputs import model_folder

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
    if template is not None:
        tokenizer.chat_template = template
        setattr(tokenizer, _IS_SET, True)
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
