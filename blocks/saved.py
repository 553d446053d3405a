"""Deployment parameters with a typed form; a saved block may supply some or all fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from httpx import HTTPError, InvalidURL
from prefect.blocks.core import Block
from pydantic import ConfigDict, Field, HttpUrl, model_validator

from prefect_rlhf.errors.by_hand import ByHand
from prefect_rlhf.errors.wrong_setting import wrong
from prefect_rlhf.files.path_text import MOST_CHARACTERS, PathText

DOCUMENTATION_URL = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")  # how blocks are saved, found and shared
NEEDED = "Needed unless you name a saved block. "  # a schema that requires a path would refuse a saved block alone


def load_example(module: str, block: str, variable: str) -> str:
    """Return the code that Prefect's UI shows on the page of a block."""
    return f"""
    ```python
    from prefect_rlhf.blocks.{module} import {block}

    {variable} = {block}.load("BLOCK_NAME")
    ```
    """


class DeploymentParameter(ByHand):
    """Base of parameters that a block may supply. Values are frozen, and an unknown key is an error.

    A parameter of a Block type would have no form in the UI, only a list of saved blocks, and it would lose values that
    a deployment sets in place. Therefore parameters are plain values, and `saved` names a block for the fields left
    out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    block: ClassVar[type[Block]]

    path: PathText = Field("", description=f"{NEEDED}Path of the files.")
    saved: str = Field(
        "",
        title="Saved block",
        max_length=MOST_CHARACTERS,
        description="Name of a saved block; it fills the fields that you leave empty or at their defaults.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_saved(cls, value: Any) -> Any:
        """Replace a block by its fields. If `saved` is set and no path, fill in the fields that are not set.

        The UI's form sends every field, so a field at its default counts as not set.
        """
        if isinstance(value, cls.block):
            return _fields(value)
        if isinstance(value, dict) and value.get("saved") and not value.get("path"):
            defaults = {name: field.default for name, field in cls.model_fields.items()}
            typed = {key: field for key, field in value.items() if key not in defaults or field != defaults[key]}
            return _fields(_load(cls.block, value)) | typed
        return value

    @model_validator(mode="after")
    def _has_path(self) -> DeploymentParameter:
        if not self.path:
            raise wrong(self, "path", "a path, or the name of a block in `saved`")
        return self


def _fields(block: Block) -> dict[str, Any]:
    return block.model_dump(include=set(type(block).model_fields))


def _load(kind: type[Block], given: Mapping[str, Any]) -> Block:
    try:
        block = kind.load(given["saved"], _sync=True)  # type: ignore[call-arg]  # Prefect's dispatcher adds _sync
    except (ValueError, RuntimeError, OSError, HTTPError, InvalidURL) as error:  # no such block, or no server
        why = "" if isinstance(error, ValueError | InvalidURL) else f" on a reachable server ({error!s:.120})"
        expected = f"the name of a saved {kind.get_block_type_slug()} block (prefect block ls){why}"
        raise wrong(given, "saved", expected) from error
    assert isinstance(block, kind)
    return block
