"""Settings made in Python code: a mistake in such a call gives a single line, as in a parameter file."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic._internal._model_construction import ModelMetaclass

from prefect_rlhf.errors.errors import InvalidInput, UnknownKey
from prefect_rlhf.errors.right_value import right_value
from prefect_rlhf.errors.wrong_setting import known_mistake, without_branches


class WrongCall(InvalidInput):
    """Python code makes or changes a settings group incorrectly; the text is the mistake's."""

    def __init__(self, mistake: InvalidInput) -> None:
        super().__init__(mistake.field, mistake.seen, mistake.expected)
        self.args = (mistake,)
        self.mistake = mistake

    def __str__(self) -> str:
        return str(self.mistake)


class _MadeByHand(ModelMetaclass):
    """The class of such classes. Pydantic does not call a class to validate, so files and forms come not this way."""

    if not TYPE_CHECKING:  # a class has the arguments of its fields

        def __call__(cls, *positional: Any, **values: Any) -> Any:
            """Make a group. Raises WrongCall for the first mistake."""
            if positional:
                first = next(iter(cls.model_fields), "name")
                expected = f"values by name: {cls.__name__}({first}={positional[0]!r:.60})"
                raise WrongCall(InvalidInput(cls.__name__, positional[0], expected))
            try:
                return super().__call__(**values)
            except ValidationError as error:
                raise WrongCall(_first_mistake(cls, error)) from None


class ByHand(BaseModel, metaclass=_MadeByHand):
    """Base class for groups that you may make in Python."""

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            """Set a private attribute. Raises WrongCall for a field: groups are frozen."""
            try:
                super().__setattr__(name, value)
            except ValidationError:
                group = type(self).__name__
                expected = f"a new group, since groups do not change: {group}({name}={value!r:.60}, ...)"
                raise WrongCall(InvalidInput(f"{group}.{name}", value, expected)) from None

        def __getattr__(self, name: str) -> Any:
            """Return a private attribute. Raises AttributeError with the fields that may be meant."""
            if name.startswith("_"):
                return super().__getattr__(name)
            group, fields = type(self), list(type(self).model_fields)
            raise AttributeError(f"{group.__name__} has no field {name!r}; {_meant(group, name, fields)}")


def _first_mistake(group: type[BaseModel], error: ValidationError) -> InvalidInput:
    first = error.errors(include_url=False)[0]
    inner = without_branches(first["loc"])
    field = ".".join((group.__name__, *inner))
    if first["type"] == "extra_forbidden":
        owner = _group_at(group, inner[:-1])
        return UnknownKey(field, first["input"], _meant(owner, inner[-1], list(owner.model_fields)))
    return known_mistake(field, first) or InvalidInput(field, first["input"], right_value(first))


def _meant(group: type[BaseModel], name: str, fields: list[str]) -> str:
    """Return the fields that somebody may mean, also in groups of the group, or else all fields."""
    inside = [path for path in _paths(group) if path.rpartition(".")[2] == name]
    near = inside or get_close_matches(name[:100], fields)
    return f"closest: {', '.join(near)}" if near else f"the fields are {', '.join(fields)}"


def _paths(group: type[BaseModel], before: str = "") -> Iterator[str]:
    for name, field in group.model_fields.items():
        yield f"{before}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{before}{name}.")


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _group_at(group: type[BaseModel], place: list[str]) -> type[BaseModel]:
    for name in place:
        annotation = group.model_fields[name].annotation if name in group.model_fields else None
        inner = [kind for kind in (annotation, *get_args(annotation)) if _is_group(kind)]
        if not inner:
            return group
        group = inner[0]
    return group
