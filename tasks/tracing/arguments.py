"""Checks the arguments that a body passes to its functions, so that a wrong type is refused at the line that passes
it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

from prefect_rlhf.errors.errors import GraphError
from prefect_rlhf.placement.models.outputs import head_of

Given = ParamSpec("Given")
Result = TypeVar("Result")


def naming_arguments(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Make a function name its parameters in the TypeError for a wrong call."""
    signature = inspect.signature(function)
    of_many = inspect.Parameter.VAR_POSITIONAL
    names = ", ".join(("*" if each.kind is of_many else "") + name for name, each in signature.parameters.items())

    @wraps(function)
    def checked(*arguments: Given.args, **named: Given.kwargs) -> Result:
        try:
            signature.bind(*arguments, **named)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}; its arguments are {names}") from None
        return function(*arguments, **named)

    return checked


def check_whole(where: str, name: str, value: object, meaning: str, least: int | None = None) -> None:
    """Raise GraphError unless `value` is None or a whole number, of at least `least`."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        remedy = f": {int(value)}" if isinstance(value, float) and value.is_integer() else ""
        bound = "" if least is None else f" of at least {least}"
        raise GraphError(f"{where}: got {name}={value!r:.60}, expected a whole number{bound}{remedy} ({meaning})")


def check_number(where: str, name: str, value: object) -> None:
    """Raise GraphError unless `value` is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise GraphError(f"{where}: got {name}={value!r:.60}, expected a finite number")


def check_temperature(where: str, value: object, outputs: Sequence[str]) -> None:
    """Raise GraphError unless logits can be divided by `value`, and one of the `outputs` has logits if it is not 1."""
    check_number(where, "temperature", value)
    if not isinstance(value, int | float) or value <= 0:
        expected = "more than 0: logits are divided by it; for greedy sampling, which has 0, it is 1.0"
        raise GraphError(f"{where}: got temperature={value!r:.60}, expected {expected}")
    if value != 1 and not any(head_of(output) == "lm" for output in outputs):
        raise GraphError(f"{where}: temperature is not used: {' and '.join(outputs)} have no logits; remove it")


def check_kind(where: str, name: str, value: object, kind: type, example: str = "") -> None:
    """Raise GraphError unless `value` is None or an instance of a settings class. For a dict, the error shows the
    class.
    """
    if value is None or isinstance(value, kind):
        return
    fields = ", ".join(f"{key}={field!r}" for key, field in value.items()) if isinstance(value, dict) else ""
    written = f"{kind.__name__}({fields or example or '...'})"
    expected = f"{written}, or the {kind.__name__} of the flow's settings, such as algo.{name}"
    raise GraphError(f"{where}: got {name}={value!r:.60}, expected {expected}")


def check_body(name: object, body: Callable[..., object]) -> None:
    """Raise GraphError for a function that cannot be a body, since a body is called once to record its calls."""
    if not isinstance(name, str) or not name:
        raise GraphError(f'@rlhf_flow: got {name!r:.60}, expected the algorithm\'s name: @rlhf_flow("mine")')
    if not inspect.isfunction(body):
        expected = "a function: put @rlhf_flow directly above its def, and no decorator between"
        raise GraphError(f"flow {name}: got {type(body).__name__}, expected {expected}")
    if inspect.iscoroutinefunction(body) or inspect.isasyncgenfunction(body):
        raise GraphError(f"flow {name}: {body.__name__} is async, expected def without async, and no await")
    if inspect.isgeneratorfunction(body):
        raise GraphError(f"flow {name}: {body.__name__} has a yield, expected a body without one: it returns nothing")
    for parameter in inspect.signature(body).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            expected = "a separate parameter for each model, dataset and group of settings"
            raise GraphError(f"flow {name}: got {parameter}, expected {expected}")
        if parameter.annotation is parameter.empty:
            expected = "its type, since the form shows it: prompts: Prompts, actor: Model, algo: GRPO = GRPO()"
            raise GraphError(f"flow {name}: parameter {parameter.name} has no type, expected {expected}")
