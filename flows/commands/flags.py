"""Parameters as a person gives them on a command line: a file, and single ones by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from prefect_rlhf.placement.errors import InvalidInput


def read_parameters(file: Path | None, given: Sequence[str]) -> dict[str, Any]:
    """Parameters from a file, then those given one by one; a dotted name reaches into a group."""
    parameters: dict[str, Any] = {}
    if file is not None:
        if not file.is_file():
            raise InvalidInput("--parameters", str(file), "a YAML or JSON file")
        parameters = yaml.safe_load(file.read_text()) or {}
        if not isinstance(parameters, dict):
            raise InvalidInput("--parameters", str(file), "a mapping of parameter names to values")
    for name, value in pairs("--param", given).items():
        _set(parameters, name.split("."), yaml.safe_load(value))
    return parameters


def pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    """What stands left and right of each `=`."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(flag, text, "NAME=VALUE")
        found[name] = value
    return found


def _set(parameters: dict[str, Any], path: Sequence[str], value: object) -> None:
    *groups, last = path
    for group in groups:
        parameters = parameters.setdefault(group, {})
        if not isinstance(parameters, dict):
            raise InvalidInput("--param", ".".join(path), f"a name inside a group; {group} holds a value")
    parameters[last] = value
