"""Flags that all commands share: parameters of a file and single ones by name, numbers, and words on stderr."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from prefect_rlhf.placement.errors import InvalidInput, RlhfError
from prefect_rlhf.placement.in_short import in_short, one_line
from prefect_rlhf.placement.yaml_text import parse_yaml, read_yaml


class Flags(argparse.ArgumentParser):
    """Flags of a command, of which a wrong one costs a line too."""

    def error(self, message: str) -> NoReturn:
        """Raise RlhfError with what argparse says, in short."""
        raise RlhfError(f"{one_line(in_short(message, str))}; {self.prog} --help says what there is")


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return what reads a flag's whole number; argparse says what it raises for any other."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,18}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"got {in_short(text)}, expected a whole number of {least} to {most}")
        return int(text)

    return read


def read_parameters(file: Path | None, assignments: Sequence[str]) -> dict[str, Any]:
    """Return the parameters of a file, then those given one by one; a dotted name reaches into a group.

    Raises InvalidInput for what is no YAML, and for a name inside of what is no group.
    """
    parameters: dict[str, Any] = {}
    if file is not None:
        parameters = read_yaml("--parameters", file)
        parameters = {} if parameters is None else parameters
        if not isinstance(parameters, dict):
            raise InvalidInput("--parameters", str(file), "a mapping of parameter names to values")
    for name, value in read_pairs("--param", assignments).items():
        _set(parameters, name.split("."), parse_yaml(name, value, value))
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
