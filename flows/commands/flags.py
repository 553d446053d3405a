"""Flags that all commands share: parameters of a file and single ones by name, numbers, and words on stderr."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from prefect_rlhf.placement.errors import InvalidInput


def read_parameters(file: Path | None, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a file, then those given one by one; a dotted name reaches into a group."""
    parameters: dict[str, Any] = {}
    if file is not None:
        if not file.is_file():
            raise InvalidInput("--parameters", str(file), "a YAML or JSON file")
        parameters = yaml.safe_load(file.read_text()) or {}
        if not isinstance(parameters, dict):
            raise InvalidInput("--parameters", str(file), "a mapping of parameter names to values")
    for name, value in read_pairs("--param", assignments).items():
        _set(parameters, name.split("."), yaml.safe_load(value))
    return parameters


def _set(parameters: dict[str, Any], path: Sequence[str], value: object) -> None:
    *groups, last = path
    for group in groups:
        parameters = parameters.setdefault(group, {})
        if not isinstance(parameters, dict):
            raise InvalidInput("--param", ".".join(path), f"a name inside a group; {group} holds a value")
    parameters[last] = value


def read_pairs(flag: str, assignments: Sequence[str]) -> dict[str, str]:
    """Return what stands left and right of each `=`. Raises InvalidInput for a text without one."""
    pairs = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InvalidInput(flag, text, "NAME=VALUE")
        pairs[name] = value
    return pairs


def read_numbers(flag: str, text: str | None, expected: str) -> list[int]:
    """Return the numbers of a list such as 1,2,4. Raises InvalidInput, which says `expected`, for another text."""
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError as error:
        raise InvalidInput(flag, text, expected) from error


def print_error(words: object) -> None:
    """Print to stderr, at once: what is said while a command works is no part of its output."""
    print(words, file=sys.stderr, flush=True)
