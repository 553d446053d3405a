"""Where a checkpoint comes from: its run's parameters, their changes in resumed runs, and commits on the Hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python

from prefect_rlhf.tasks.play import Play
from prefect_rlhf.tasks.settings import by_dotted_name, set_by_dotted_name
from prefect_rlhf.tasks.tracing.trace import EVALUATION

CHANGES = "changes.json"  # in the folder of a run: the parameters that resumed runs changed


@dataclass(frozen=True, slots=True)
class Change:
    """A parameter changed by a resumed run, after `step` finished steps.

    >>> print(Change(4, "algo.optimizer.lr", 1e-06, 5e-07))
    after 4 steps: algo.optimizer.lr 1e-06 -> 5e-07
    """

    step: int
    parameter: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"after {self.step} steps: {self.parameter} {self.before} -> {self.now}"


@dataclass(frozen=True, slots=True)
class Lineage:
    """A run's parameters by their dotted names, and all changes since the first run, oldest first.

    `commits` are the commits it reads from the Hub, by repository and branch: a resumed run reads the same.
    """

    parameters: dict[str, Any] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()
    commits: dict[str, str] = field(default_factory=dict)

    def change_of(self, parameter: str) -> Change | None:
        """Return a parameter's newest change."""
        return next((change for change in reversed(self.changes) if change.parameter == parameter), None)


def parameters_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flow's arguments as plain values, each by its dotted name.

    Leaves out paths of models and data, which may differ, and plays, because their arguments may be secret.

    >>> from prefect_rlhf.tasks.settings import Update
    >>> parameters_of({"update": Update(epochs=2), "staleness": 0})
    {'update.epochs': 2, 'update.mini_batches': 1, 'staleness': 0}
    """
    stated = {name: value for name, value in arguments.items() if not isinstance(value, Play)}
    plain = to_jsonable_python(stated, fallback=str)
    return {
        name: value
        for name, value in by_dotted_name(plain).items()
        if not (name.endswith(".path") and (name.count(".") == 1 or name.startswith(f"{EVALUATION}.")))
    }


def with_parameters(arguments: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flow's arguments with some parameters replaced, given by dotted name.

    Raises pydantic's ValidationError if a value does not fit the others.
    """
    changed = dict(arguments)
    groups = dict.fromkeys(name.partition(".")[0] for name in values)
    for group in groups:
        of_group = {name.partition(".")[2]: value for name, value in values.items() if name.partition(".")[0] == group}
        changed[group] = _with(arguments[group], of_group)
    return changed


def _with(argument: Any, values: Mapping[str, Any]) -> Any:
    """Return an argument with other values at paths inside it; an empty path is the argument itself."""
    if "" in values:
        return values[""]
    if isinstance(argument, Mapping):  # named sets, which are groups each
        changed = dict(argument)
        for path, value in values.items():
            key, _, rest = path.partition(".")
            changed[key] = _with(changed[key], {rest: value})
        return changed
    plain = argument.model_dump(mode="json")
    for path, value in values.items():
        set_by_dotted_name(plain, path, value)
    return type(argument).model_validate_json(json.dumps(plain))
