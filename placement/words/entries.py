"""Axes and words as pydantic fields: of a call in a plan file, and of its words in a run's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Self, TypeVar, cast

from pydantic import BaseModel, Field, ModelWrapValidatorHandler, create_model, model_validator

from prefect_rlhf.errors.wrong_setting import not_used
from prefect_rlhf.placement.devices.axes import AXES, OFFERED
from prefect_rlhf.placement.words.table import WORDS
from prefect_rlhf.placement.words.word import MOST, Word

Degree = Annotated[int, Field(ge=1, le=MOST)]


class Entries(BaseModel):
    """Base of models to which `with_words` adds a field for each axis and word, also for words registered later."""

    words_are_optional: ClassVar[bool] = False
    """Whether a field without a value is None, for a word that is not stated. Otherwise it has the word's default."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_registered_words(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, Mapping):
            for axis in AXES.values():
                if not axis.is_offered and value.get(axis.name) is not None:
                    raise not_used(axis.name, f"no engine offers {axis.title}, which divides {axis.divides}")
        if isinstance(value, cls) or WORDS.keys() <= cls.model_fields.keys():
            return handler(value)
        return with_words(cls).model_validate(value)


Entry = TypeVar("Entry", bound=Entries)


def with_words(model: type[Entry]) -> type[Entry]:
    """Add to a model a field for each axis that engines offer, and for each word that it lacks."""
    return cast(type[Entry], _extended(model, tuple(WORDS.values())))


@lru_cache(maxsize=64)
def _extended(model: type[Entries], words: tuple[Word[Any], ...]) -> type[Entries]:
    fields: dict[str, Any] = {}
    for axis in OFFERED:
        if axis not in model.model_fields:
            kind, default = (Degree | None, None) if model.words_are_optional else (Degree, 1)
            fields[axis] = (kind, Field(default, description=AXES[axis].description))
    for word in words:
        if word.name not in model.model_fields:
            default = None if model.words_are_optional else word.default
            kind = word.type | None if default is None else word.type
            fields[word.name] = (kind, Field(default, description=word.description))
    return create_model(model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields)
