"""The parameter `plan` as a value: a search, a measurement, a preset, a file, or several plans by step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.yaml_text import read_yaml
from prefect_rlhf.placement.plans.presets import is_preset

FIELD = "plan"
AUTO = "auto"
MEASURE = "measure"
MOST_PLANS = 10


@dataclass(frozen=True, slots=True)
class Auto:
    """Search for a plan before the run."""

    def __str__(self) -> str:
        return AUTO


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure a search's best `count` plans, and use the fastest."""

    count: int

    def __str__(self) -> str:
        return f"{MEASURE}({self.count})"


@dataclass(frozen=True, slots=True)
class PresetPlan:
    """A preset by name. A misspelt name raises at completion, with a list of presets."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan file. A missing file raises when it is read."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


@dataclass(frozen=True, slots=True)
class PlanContent:
    """A plan written inline, in a file of plans by step."""

    content: Any

    def __str__(self) -> str:
        return "this plan"


SinglePlan = Auto | Measure | PresetPlan | PlanFile | PlanContent


@dataclass(frozen=True, slots=True)
class PlansByStep:
    """Plans with their first steps, in the stated order; `file` is the file they come from, unless the form states
    them.
    """

    plans: tuple[tuple[int, SinglePlan], ...]
    file: Path | None = None

    def __str__(self) -> str:
        """Return a short text.

        >>> str(read_plan_choice({1: "auto", 41: "plans/long.yaml"}))
        'auto, long from 41'
        """
        if self.file is not None:
            return str(self.file)
        names = [(step, Path(str(plan)).stem) for step, plan in self.plans]
        return ", ".join([*(name for _, name in names[:1]), *(f"{name} from {step}" for step, name in names[1:])])

    def until(self, step: int) -> PlansByStep | None:
        """Return the plans that begin at or before `step`; None if no plan does."""
        plans = tuple(each for each in self.plans if each[0] <= step)
        return PlansByStep(plans, self.file) if plans else None


PlanChoice = SinglePlan | PlansByStep


def is_searched(choice: PlanChoice) -> bool:
    """Whether the run uses a plan from a search.

    >>> [is_searched(read_plan_choice(plan)) for plan in ("measure(3)", {1: "flattening", 6: "auto"}, "flattening")]
    [True, True, False]
    """
    plans = [plan for _, plan in choice.plans] if isinstance(choice, PlansByStep) else [choice]
    return any(isinstance(plan, Auto | Measure) for plan in plans)


def read_plan_choice(plan: str | Mapping[int, str]) -> PlanChoice:
    """Parse the parameter `plan`. A file is read only to see whether it has plans by step.

    Raises InvalidInput for `measure` without a valid number, a file that is not YAML, and an entry of plans by step
    that is not a single plan.
    """
    if not isinstance(plan, str):
        return PlansByStep(tuple((step, _entry(step, each)) for step, each in plan.items()))
    single = _single(plan)
    if isinstance(single, PlanFile) and (by_step := read_plans_by_step(single.path)) is not None:
        return by_step
    return single


def read_plans_by_step(file: Path) -> PlansByStep | None:
    """Return a file's plans by step; None for a missing file or the file of a single plan."""
    content = read_yaml(FIELD, file) if file.is_file() else None
    if not isinstance(content, dict) or not content or not all(isinstance(step, int) for step in content):
        return None
    return PlansByStep(tuple((step, _entry(step, each)) for step, each in content.items()), file)


def _entry(step: int, plan: Any) -> SinglePlan:
    """Return the plan at a step of a list. Raises InvalidInput, which names the step."""
    if not isinstance(plan, str):
        return PlanContent(plan)
    field = f"{FIELD}.{step}"
    found = _single(plan, field)
    if isinstance(found, Measure) or (isinstance(found, PlanFile) and read_plans_by_step(found.path) is not None):
        raise InvalidInput(field, plan, "auto, a preset's name or the file of a single plan")
    return found


def _single(plan: str, field: str = FIELD) -> SinglePlan:
    """Return the plan that a text names.

    >>> _single("measure(3)"), _single("flattening"), _single("plans/measure.yaml")
    (Measure(count=3), PresetPlan(name='flattening'), PlanFile(path=PosixPath('plans/measure.yaml')))
    """
    if plan == AUTO:
        return Auto()
    if re.fullmatch(rf"{MEASURE}\b.*", plan) and not plan.endswith((".yaml", ".yml", ".json")):
        number = re.fullmatch(rf"{MEASURE}\((\d{{1,3}})\)", plan)
        if number is None or not 1 <= int(number[1]) <= MOST_PLANS:
            raise InvalidInput(field, plan, f"{MEASURE}(k), which runs k plans, from 1 to {MOST_PLANS}")
        return Measure(int(number[1]))
    if is_preset(plan) or (plan.isidentifier() and not Path(plan).exists()):
        return PresetPlan(plan)
    return PlanFile(Path(plan))
