"""Writes a run's parameters as a file that `--parameters` accepts unchanged, and that starts the same run again."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import to_jsonable_python

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.yaml_text import parse_yaml, to_yaml
from prefect_rlhf.flows.forms.check import checked_value
from prefect_rlhf.flows.forms.left_out import left_out, without_secrets

NOT_OF_A_RUN = ("dry_run",)


def plain_parameters(signature: inspect.Signature, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's parameters, defaults included, as plain values that the form reads back as the same parameters.

    `values` are checked parameters. A text that the form refuses stands in place of a secret, and of a value that YAML
    cannot hold: an object of a type of your own, for example.
    """
    stated = {name: value for name, value in values.items() if name not in NOT_OF_A_RUN}
    if stated.get("epochs") is not None:
        stated.pop("steps", None)  # a run of epochs has no steps of its own
    return {
        name: without_secrets({name: _plain(signature.parameters[name], value)})[name] for name, value in stated.items()
    }


def _plain(parameter: inspect.Parameter, value: Any) -> Any:
    """Return a value as YAML holds it, or what stands in its place if the form would read another value of it."""
    stand_in = left_out(f"a {type(value).__name__}")
    try:
        plain = to_jsonable_python(value, inf_nan_mode="constants")
        if isinstance(plain, dict) and plain.get("saved") == "":  # a block that nobody named
            del plain["saved"]
        again = checked_value(parameter, parse_yaml(parameter.name, "its file", to_yaml(plain)))
    except (InvalidInput, ValueError, TypeError):  # of an object that pydantic, YAML or the form does not know
        return stand_in
    return plain if again == value and type(again) is type(value) else stand_in


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each difference between two runs' parameters: dotted name and both values, None for a missing value.

    >>> list(changed({"algo": {"lr": 1, "size": 8}, "seed": 1}, {"algo": {"lr": 2, "size": 8}}))
    [('algo.lr', 1, 2), ('seed', 1, None)]
    """
    for name in dict.fromkeys((*before, *after)):
        one, other = before.get(name), after.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from ((f"{name}.{inner}", *values) for inner, *values in changed(one, other))
        elif one != other or type(one) is not type(other):
            yield str(name), one, other
