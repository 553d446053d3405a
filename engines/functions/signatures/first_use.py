"""A play's first use of a package or of your code: either it works, or the play is refused."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from prefect_rlhf.engines.functions.load import reason
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.errors.errors import InvalidInput


def package(module: str, expected: str) -> Any:
    """Import a package's module. Raises InvalidInput, at `play.python`, for an interpreter without `expected`."""
    try:
        return import_module(module)
    except ImportError as error:
        raise InvalidInput("play.python", sys.executable, f"an interpreter with {expected}") from error


def made(make: Callable[[], Any], function: PlayFunction, kind: str) -> Any:
    """Make an environment. Raises InvalidInput for a `kind`, such as a class, that does not accept `play.arguments`."""
    try:
        return make()
    except BaseException as error:  # a person's code may raise anything
        right = f"{kind} that takes play.arguments: {reason(error, '')}"
        raise InvalidInput(function.field, function.function, right) from error
