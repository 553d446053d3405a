"""Imports a user's function in the process that calls it, or refuses it and says what was expected."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from prefect_rlhf.engines.functions.arguments import AS_WRITTEN, columns_named, fitting_signature
from prefect_rlhf.engines.functions.function import HostFunction, NamedFunction
from prefect_rlhf.errors.blame import described, own_place
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.modules import import_from


@dataclass(frozen=True, slots=True)
class LoadedFunction:
    """An imported function: the callable, whether it is async, the columns that it names, and its file and line."""

    of: HostFunction
    call: Callable[..., Any]
    asynchronous: bool
    named: tuple[str, ...]
    place: str


def load(function: HostFunction) -> LoadedFunction:
    """Import a function. Raises InvalidInput if that fails, or if the function takes other arguments."""
    found = imported(function)
    place = place_of(found)
    if not callable(found) or inspect.isclass(found):
        raise InvalidInput(function.field, function.function, f"a function, not {_kind(found)}")
    try:
        named = columns_named(found, function.signature)
    except TypeError as error:
        fitting = fitting_signature(found)
        takes = f"a function that takes {AS_WRITTEN[function.signature]}: {error}"
        expected = at(takes, place) + (f"; set signature: {fitting}" if fitting else "")
        raise InvalidInput(function.field, function.function, expected) from error
    plain = _whole(found)
    is_async = inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(type(plain).__call__)
    return LoadedFunction(function, found, is_async, named, place)


def imported(function: NamedFunction) -> object:
    """Import the function or class with this name. Raises InvalidInput if it cannot be imported."""
    module = _module(function)
    try:
        return _attribute(function, module)
    except InvalidInput:
        raise
    except BaseException as error:  # a module may make its names by a function of its own
        expected = f"a module that can be imported: {reason(error, '')}"
        raise InvalidInput(function.field, function.function, expected) from error


def reason(error: BaseException, place: str) -> str:
    """Describe an error in one line; an error without a place in a user's file gets the function's place."""
    try:
        text, own = described(error), own_place(error)
    except Exception:  # noqa: BLE001  the text of a foreign error may itself raise
        text, own = type(error).__name__, ""
    return text if own else at(text, place)


def at(text: str, place: str) -> str:
    """Append a place to a text, if it is known.

    >>> at("it ended", "mine.py:3 in f")
    'it ended (mine.py:3 in f)'
    """
    return f"{text} ({place})" if place else text


def place_of(function: object) -> str:
    """Return `file:line in name` of a function's definition; empty if unknown."""
    if not callable(function):
        return ""
    plain = inspect.unwrap(_whole(function))
    code = getattr(plain, "__code__", None) or getattr(type(plain).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}" if code else ""


def _module(function: NamedFunction) -> ModuleType:
    file = function.file
    if file is not None and not file.is_file():
        raise InvalidInput(function.field, function.function, f"an existing file; {file.absolute()} does not exist")
    try:
        return import_from(file.stem, str(file.absolute())) if file is not None else import_module(function.module)
    except BaseException as error:  # noqa: BLE001  a user's module may raise anything, SystemExit too
        expected = f"a module that can be imported: {reason(error, '')}"
        raise InvalidInput(function.field, function.function, expected) from error


def _attribute(function: NamedFunction, module: ModuleType) -> object:
    found: object = module
    for name in function.attribute.split("."):
        if not hasattr(found, name):
            task = _reasoning_gym_task(function)
            if task is not None:
                return task
            names = get_close_matches(name, [n for n in dir(found) if not n.startswith("_")], n=3, cutoff=0.4)
            near = f"; it has {', '.join(names)}" if names else ""
            raise InvalidInput(function.field, function.function, f"a function in {function.module}{near}")
        found = getattr(found, name)
    return found


def _reasoning_gym_task(function: NamedFunction) -> Callable[..., Any] | None:
    """Return the scoring function of the task in `reasoning_gym:task`; None for another function."""
    if not isinstance(function, HostFunction) or function.signature != "reasoning_gym":
        return None
    if function.module != "reasoning_gym":
        return None
    factory = import_module("reasoning_gym.factory")
    if function.attribute not in factory.DATASETS:
        return None
    score: Callable[..., Any] = factory.get_score_answer_fn(function.attribute)
    return score


def _whole(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, partial):
        function = function.func
    return function


def _kind(found: object) -> str:
    return "a class" if inspect.isclass(found) else f"a value of type {type(found).__name__}"
