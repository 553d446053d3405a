"""The names of the package's door with their signatures, as tests/door.txt freezes them.

`python -m tests.door` writes them anew, when a change is meant.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import prefect_rlhf
from prefect_rlhf.door import MODULES
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.tasks.settings import Settings
from prefect_rlhf.tasks.tracing.operations import Operator

FROZEN = Path(__file__).with_suffix(".txt")


def public_names() -> Mapping[str, Any]:
    """Return the values of the package and of its public modules, by name: `generate`, `losses.grpo`."""
    names = {name: getattr(prefect_rlhf, name) for name in dir(prefect_rlhf) if name not in MODULES}
    for module in (getattr(prefect_rlhf, name) for name in MODULES):
        place = module.__name__.removeprefix("prefect_rlhf.")
        names |= {f"{place}.{name}": getattr(module, name) for name in module.__all__}
    return names


def door() -> str:
    """Return each public name with its parameters, a line each."""
    return "".join(f"{name}{taken(thing)}\n" for name, thing in sorted(public_names().items()))


def taken(thing: Any) -> str:
    """Return the parameters of a function or class, or the fields of settings; a default shows as `=`."""
    if isinstance(thing, Operator):
        return f" is a {thing.kind} of {', '.join(inspect.signature(thing.function).parameters)}"
    if isinstance(thing, AlgorithmFlow):
        return f" is an algorithm of {', '.join(inspect.signature(thing.algorithm.body).parameters)}"
    if isinstance(thing, type) and issubclass(thing, Settings):
        return f" has {', '.join(name + '=' * (not field.is_required()) for name, field in _fields(thing))}"
    if isinstance(thing, type) and issubclass(thing, Exception):
        return f" is an error, of {', '.join(base.__name__ for base in thing.__bases__)}"
    if not isinstance(thing, type) and not inspect.isfunction(thing):
        return " is a type of parameters"
    parameters = [
        parameter.replace(annotation=parameter.empty, default=parameter.empty if _is_required(parameter) else ...)
        for parameter in inspect.signature(thing).parameters.values()
    ]
    return str(inspect.Signature(parameters)).replace("=Ellipsis", "=")


def _fields(kind: type[Settings]) -> Any:
    return kind.model_fields.items()


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is inspect.Parameter.empty


if __name__ == "__main__":
    FROZEN.write_text(door())
