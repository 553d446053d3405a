"""Deployment parameters that may come from a saved block: typed fields in a form, some or all of them saved before."""

from __future__ import annotations

from typing import Any, ClassVar

from prefect.blocks.core import Block
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, model_validator

from prefect_rlhf.placement.errors import InvalidInput

DOCUMENTATION_URL = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")  # how blocks are saved, found and shared


class DeploymentParameter(BaseModel):
    """Base of parameters with a block beside them: frozen, and no key is ever ignored.

    A parameter of a Block type would show no form in the UI, only a list of saved blocks, and lose values that a
    deployment gives in place. So parameters are plain values, and `saved` names a block for what is left out.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    block: ClassVar[type[Block]]

    path: str = Field("", description="Where it is; may be left out when `saved` is given.")
    saved: str = Field(
        "", title="Saved block", description="Name of a saved block for what is left empty or at its default here."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_saved(cls, given: Any) -> Any:
        """A block counts as its fields; a name in `saved`, without a path, fills in what is not given.

        The UI's form sends every field, so one at its default counts as not given.
        """
        if isinstance(given, cls.block):
            return _fields(given)
        if isinstance(given, dict) and given.get("saved") and not given.get("path"):
            return _fields(_load(cls.block, given["saved"])) | {
                key: value for key, value in given.items() if key not in cls.model_fields or value != cls._default(key)
            }
        return given

    @classmethod
    def _default(cls, field: str) -> Any:
        return cls.model_fields[field].default

    @model_validator(mode="after")
    def _has_path(self) -> DeploymentParameter:
        if not self.path:
            raise InvalidInput(f"{type(self).__name__.lower()}.path", self.path, "a path, or `saved`: a block's name")
        return self


def _fields(block: Block) -> dict[str, Any]:
    return block.model_dump(include=set(type(block).model_fields))


def _load(kind: type[Block], name: str) -> Block:
    try:
        found = kind.load(name, _sync=True)  # type: ignore[call-arg]  # Prefect's dispatcher adds _sync
    except ValueError as error:
        expected = f"the name of a saved {kind.get_block_type_slug()} block (prefect block ls)"
        raise InvalidInput("saved", name, expected) from error
    assert isinstance(found, kind)
    return found
