"""Reports mistakes in a plan file in our own words."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from prefect_rlhf.errors.errors import InvalidInput, Missing, NotUsed, UnknownKey
from prefect_rlhf.errors.wrong_setting import NOT_USED

NAMES_OF_CALLS = "names of calls, each with a mesh and an engine"
ENTRY = 'a mapping such as {mesh: "n0:0-1", engine: megatron, dp: 2}'
_RIGHT: Mapping[str, str] = MappingProxyType(
    {
        "int_type": "a whole number, without quotes",
        "float_type": "a number, without quotes",
        "bool_type": "true or false, without quotes",
        "list_type": "a list such as [0, 1]",
        "too_short": NAMES_OF_CALLS,
    }
)
"""What would be right, by pydantic's names of mistakes."""


def mistakes_of(error: ValidationError, file_keys: Sequence[str], call_keys: Sequence[str]) -> list[InvalidInput]:
    """Return the mistakes of a plan file.

    If a group has an unknown key, its missing keys are not reported, because the unknown key may be meant as one of
    them.
    """
    misspelt = {mistake["loc"][:-1] for mistake in error.errors() if mistake["type"] == "extra_forbidden"}
    return [
        _in_our_words(mistake, file_keys, call_keys)
        for mistake in error.errors()
        if mistake["type"] != "missing" or mistake["loc"][:-1] not in misspelt
    ]


def _in_our_words(mistake: ErrorDetails, file_keys: Sequence[str], call_keys: Sequence[str]) -> InvalidInput:
    place = [part for part in mistake["loc"] if part != "[key]"]
    kind, seen, field = mistake["type"], mistake["input"], ".".join(map(str, ("plan", *place)))
    if kind == "extra_forbidden":
        keys = file_keys if len(place) == 1 else call_keys
        return UnknownKey(field, seen, f"the keys are {', '.join(keys)}")
    if kind == NOT_USED:
        field = ".".join((field, mistake["ctx"]["field"]))
        return NotUsed(field, seen[mistake["ctx"]["field"]], mistake["ctx"]["reason"])
    if kind == "missing":
        return Missing(field, "a value: this key is required")
    if "[key]" in mistake["loc"] or kind == "invalid_key":
        place, right = place[:-1], "a key in words" if kind == "invalid_key" else "the name of a call, in words"
    elif kind in ("dict_type", "model_type"):
        right = f"a mapping: {NAMES_OF_CALLS}" if len(place) == 1 else ENTRY
    elif kind == "string_type":
        right = 'a mesh such as "n0:0-1"' if place[-1] == "mesh" else 'words, in quotes if they look like a number: "3"'
    else:
        right = (
            _RIGHT.get(kind)
            or _range(mistake)
            or mistake["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        )
    return InvalidInput(".".join(map(str, ("plan", *place))), seen, right)


def _range(mistake: ErrorDetails) -> str:
    bounds = mistake.get("ctx", {})
    if "ge" in bounds:
        return f"{bounds['ge']} or more"
    return f"at most {bounds['le']}" if "le" in bounds else ""
