"""The tokenizer of a model folder, loaded once per process."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from prefect_rlhf.errors.errors import refusing
from prefect_rlhf.files.storage.inputs import model_folder


def tokenizer_of(folder: str, field: str = "play", seen: str = "a play") -> Any:
    """Return the tokenizer of a model folder. Raises InvalidInput, about `field`, for a folder without a tokenizer."""
    expected = f"a tokenizer in the model folder {folder}, to decode its tokens"
    local = model_folder(folder, field, "tokenizer")
    with refusing(Exception, field, seen, expected):  # for any error, a person must change the file
        return loaded(str(local))


@lru_cache(maxsize=4)
def loaded(folder: str) -> Any:
    """Return the tokenizer of a folder on this machine. Raises any error of transformers."""
    from transformers import AutoTokenizer  # only here: it takes seconds to import

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def template_source(tokenizer: Any) -> str:
    """Return the text of a tokenizer's chat template, or of all its templates; empty without any."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""
