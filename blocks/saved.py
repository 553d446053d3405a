"""Deployment parameters that may come from a saved block: typed fields in a form, some or all of them saved before."""

from __future__ import annotations

from typing import Any, ClassVar

from httpx import HTTPError
from prefect.blocks.core import Block
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, model_validator

from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.placement.path_text import MOST_CHARACTERS, PathText

DOCUMENTATION_URL = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")  # how blocks are saved, found and shared


class DeploymentParameter(BaseModel):
    """Base of parameters with a block beside them: frozen, and no key is ever ignored.

    A parameter of a Block type would show no form in the UI, only a list of saved blocks, and lose values that a
    deployment gives in place. So parameters are plain values, and `saved` names a block for what is left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    block: ClassVar[type[Block]]

    path: PathText = Field("", description="Where it is; may be left out when `saved` is given.")
    saved: str = Field(
        "",
        title="Saved block",
        max_length=MOST_CHARACTERS,
        description="Name of a saved block for what is left empty or at its default here.",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_saved(cls, value: Any) -> Any:
        """Take a block as its fields; where `saved` is given without a path, fill in what is not given.

        The UI's form sends every field, so one at its default counts as not given.
        """
        if isinstance(value, cls.block):
            return _fields(value)
        if isinstance(value, dict) and value.get("saved") and not value.get("path"):
            defaults = {name: field.default for name, field in cls.model_fields.items()}
            typed = {key: field for key, field in value.items() if key not in defaults or field != defaults[key]}
            return _fields(_load(cls.block, value["saved"])) | typed
        return value

    @model_validator(mode="after")
    def _has_path(self) -> DeploymentParameter:
        if not self.path:
            raise InvalidInput(f"{type(self).__name__.lower()}.path", self.path, "a path, or `saved`: a block's name")
        return self


def _fields(block: Block) -> dict[str, Any]:
    return block.model_dump(include=set(type(block).model_fields))


def _load(kind: type[Block], name: str) -> Block:
    try:
        block = kind.load(name, _sync=True)  # type: ignore[call-arg]  # Prefect's dispatcher adds _sync
    except (ValueError, RuntimeError, OSError, HTTPError) as error:  # no such block, or no server that could know it
        why = "" if isinstance(error, ValueError) else f", from a server that answers ({error!s:.120})"
        expected = f"the name of a saved {kind.get_block_type_slug()} block (prefect block ls){why}"
        raise InvalidInput("saved", name, expected) from error
    assert isinstance(block, kind)
    return block
