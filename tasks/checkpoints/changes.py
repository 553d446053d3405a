"""Decides whether a run may resume with changed parameters: only with those that it names.

A named parameter may change if it affects only the numbers of later steps. The order of rows, a step's calls and the
models' shapes then stay as in the checkpoint, and its optimizer moments and states keep their meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from prefect_rlhf.errors.errors import InvalidInput, NotUsed
from prefect_rlhf.tasks.checkpoints.folders import Checkpoint
from prefect_rlhf.tasks.checkpoints.lineage import Change, parameters_of, with_parameters
from prefect_rlhf.tasks.checkpoints.run_identity import all_differences, first_difference
from prefect_rlhf.tasks.settings import Optimizer, Settings

FIELD = "resume_changes"
DECAY = "decay_steps"  # of an optimizer; if it is empty, the run's steps decide

_OF_LATER_STEPS = re.compile(
    r"models\.[^.]+\.optimizer\.(?!betas)\w+"
    r"|calls\.[^.]+\.(terms\.[^.]+\.)?(operation\.settings\..+|temperature|weight|mean_over)"
)
"""Places in an identity that affect only numbers of later steps. Betas do not: moments are means under the betas that
made them."""

_NO_NUMBER = "a parameter that is a number, or the schedule of a learning rate"
_OTHER_STEPS = "a parameter that changes no rows, calls or lengths of a step"
_ONLY_AT_START = "a parameter that later steps read; the checkpoint has the value that came of this one"


@dataclass(frozen=True, slots=True)
class ResumedRun:
    """A run that continues from a checkpoint, with its own arguments.

    `saved` is the checkpoint's identity; `identity_of` computes the run's identity for other arguments. `optimizers`
    names the parameter of each role's optimizer, such as algo.optimizer.
    """

    checkpoint: Checkpoint
    saved: Mapping[str, Any]
    arguments: Mapping[str, Any]
    identity_of: Callable[[Mapping[str, Any]], dict[str, Any]]
    optimizers: Mapping[str, str]

    def changes(self, named: Iterable[str]) -> tuple[tuple[Change, ...], dict[str, Any]]:
        """Return the changes of the `named` parameters, and the run's identity without these changes.

        Raises InvalidInput for a name that may not change or has not changed, and for other parameters that differ.
        """
        named = tuple(dict.fromkeys(named))
        changes = tuple(change for name in named if (change := self._change(name)) is not None)
        for change in changes:
            if (reason := self._reason(change)) is not None:
                raise InvalidInput(FIELD, change.parameter, reason)
        identity = self._identity_before(changes)
        is_same = first_difference(self.saved, identity) is None or self.saved["algorithm"] != identity["algorithm"]
        if not is_same and (others := self._others(changes, identity)):
            raise self._refusal(others, named)
        return changes, identity

    def _change(self, name: str) -> Change | None:
        """Return the change of a named parameter; None if an earlier run made it. Raises InvalidInput without any."""
        now, lineage = parameters_of(self.arguments), self.checkpoint.manifest.lineage
        if not lineage.parameters:
            raise InvalidInput(FIELD, name, "no name: the version that wrote the checkpoint saved no parameters")
        if name not in now or name not in lineage.parameters:
            numbers = [each for each, value in now.items() if _is_number(value) and each in lineage.parameters]
            within = [each for each in numbers if each.startswith(f"{name}.")]
            near = [*within, *get_close_matches(name, numbers, 1), *(each for each in numbers if each.endswith(".lr"))]
            such_as = f", such as {near[0]}" if near else ""
            raise InvalidInput(FIELD, name, f"a number among the parameters of the algorithm{such_as}")
        before, after = self._values(name)
        if before != after:
            return Change(self.checkpoint.step, name, before, after)
        if lineage.change_of(name) is None:
            raise NotUsed(FIELD, name, f"{name} is {after} in the checkpoint too")
        return None

    def _values(self, name: str) -> tuple[Any, Any]:
        """Return the value of a parameter in the checkpoint, and in this run; of `decay_steps` the value in effect."""
        if (role := self._decaying(name)) is not None:
            identity = self.identity_of(self.arguments)
            return self.saved["models"][role]["optimizer"][DECAY], identity["models"][role]["optimizer"][DECAY]
        return self.checkpoint.manifest.lineage.parameters.get(name), parameters_of(self.arguments).get(name)

    def _decaying(self, name: str) -> str | None:
        """Return the role whose optimizer's `decay_steps` a parameter is."""
        return next((role for role, optimizer in self.optimizers.items() if name == f"{optimizer}.{DECAY}"), None)

    def _identity_before(self, changes: Iterable[Change]) -> dict[str, Any]:
        """Return the identity of the run with the checkpoint's values of the changed parameters.

        `decay_steps` that are empty and those that the steps of the run make of it are the same.
        """
        saved = self.checkpoint.manifest.lineage.parameters
        names = [change.parameter for change in changes]
        ends = [name for optimizer in self.optimizers.values() if (name := f"{optimizer}.{DECAY}") in saved]
        names += [name for name in ends if name not in names and len(set(self._values(name))) == 1]
        identity = self.identity_of(with_parameters(self.arguments, {name: saved[name] for name in names}))
        for role in filter(None, map(self._decaying, names)):
            identity["models"][role]["optimizer"][DECAY] = self.saved["models"][role]["optimizer"][DECAY]
        return identity

    def _reason(self, change: Change) -> str | None:
        """If a parameter may not change, return what would be right; else None."""
        *groups, last = change.parameter.split(".")
        owner: Any = self.arguments
        for group in groups:
            owner = owner.get(group) if isinstance(owner, Mapping) else getattr(owner, group, None)
        is_schedule = isinstance(owner, Optimizer) and last == "schedule"
        if not is_schedule and not all(_is_number(value) for value in (change.before, change.now)):
            return _NO_NUMBER
        if isinstance(owner, Settings) and last in owner.only_at_start():
            return _ONLY_AT_START
        if self._is_read(change.parameter):
            return _OTHER_STEPS
        try:
            before = self._identity_before([change])
        except (ValidationError, InvalidInput):  # it fits only together with others, of which the whole is checked
            return None
        places = [place for place, *_ in all_differences(before, self.identity_of(self.arguments))]
        return None if all(_OF_LATER_STEPS.fullmatch(place) for place in places) else _OTHER_STEPS

    def _is_read(self, name: str) -> bool:
        """Return whether a parameter is of a model or a dataset, which are read before the graph is traced."""
        argument = self.arguments[name.partition(".")[0]]
        return isinstance(argument, BaseModel) and not isinstance(argument, Settings)

    def _others(self, changes: tuple[Change, ...], identity: Mapping[str, Any]) -> list[Change]:
        """Return the parameters that make the run another run, apart from `changes`."""
        places = [place for place, *_ in all_differences(self.saved, identity)]
        found = []
        for name in self.checkpoint.manifest.lineage.parameters.keys() & parameters_of(self.arguments).keys():
            before, after = self._values(name)
            other = Change(self.checkpoint.step, name, before, after)
            if before == after or other in changes:
                continue
            if self._is_read(name):
                is_cause = any(
                    place == f"models.{name}" or place.startswith(f"datasets.{name.partition('.')[0]}.")
                    for place in places
                )
            else:
                is_cause = self._decides(other, changes, identity)
            found += [other] if is_cause else []
        order = list(parameters_of(self.arguments))
        return sorted(found, key=lambda change: order.index(change.parameter))

    def _decides(self, other: Change, changes: tuple[Change, ...], identity: Mapping[str, Any]) -> bool:
        """Return whether the identity depends on a parameter; one that fits only together with others counts too."""
        try:
            return self._identity_before([*changes, other]) != identity
        except (ValidationError, InvalidInput):
            return True

    def _refusal(self, others: list[Change], named: tuple[str, ...]) -> InvalidInput:
        """Return the error about the first parameter that differs, with the option that permits all of them."""
        first, reasons = others[0], [self._reason(other) for other in others]
        expected = f"{first.before!r}, as in the checkpoint {self.checkpoint.folder.name}"
        if earlier := self.checkpoint.manifest.lineage.change_of(first.parameter):
            expected += f" (changed after {earlier.step} steps)"
        if not any(reasons):
            names = ",".join((*named, *(other.parameter for other in others)))
            expected += f"; to change it from here on, add -p {FIELD}={names}"
        return InvalidInput(first.parameter, first.now, expected)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or empty, which means a default number or no bound."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
