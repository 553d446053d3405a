"""Runs evaluations on this machine: one model, or two on the same prompts. Returns the lines that a terminal shows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.remote_path import local_path
from prefect_rlhf.flows.algorithm.evaluation.against import (
    Answered,
    Difference,
    page,
    show_against,
    write_against,
)
from prefect_rlhf.flows.algorithm.evaluation.flow import evaluate
from prefect_rlhf.flows.algorithm.evaluation.parameters import actor_of
from prefect_rlhf.flows.algorithm.local_run import run
from prefect_rlhf.flows.algorithm.quiet_process import quiet_process
from prefect_rlhf.flows.algorithm.run_result import PlannedRun, RunResult
from prefect_rlhf.flows.algorithm.terminal import new_log
from prefect_rlhf.flows.forms.evaluation import EvaluationSet, call_name
from prefect_rlhf.placement.devices.mesh import Backend
from prefect_rlhf.tasks.data.role_tokenizers import have_same_text
from prefect_rlhf.tasks.rl.evaluation.table import set_rows

OTHER_TOKENS = "the models have different tokenizers: they are compared by reward, and not by lengths in tokens"


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices of an evaluation: their number and kind, as for a run, and whether to show the full log."""

    number: int | None = None
    kind: Backend | None = None
    verbose: bool = False


def planned(parameters: Mapping[str, Any], on: Devices) -> PlannedRun:
    """Return the plan of an evaluation. Raises InvalidInput or GraphError if it cannot run."""
    return run(evaluate, devices=on.number, kind=on.kind, dry_run=True, **parameters)


def measured(parameters: Mapping[str, Any], on: Devices) -> RunResult:
    """Evaluate a model. Raises InvalidInput or GraphError for a mistake, before a device is used."""
    return run(evaluate, devices=on.number, kind=on.kind, verbose=on.verbose, dry_run=False, **parameters)


def lines_of(result: RunResult) -> list[str]:
    """Return a line for each metric of each set, and the folder of the rows."""
    rows = set_rows(result.metrics[-1])
    ends = [f", 95%: {row['95%']}" if row["95%"] else "" for row in rows]
    shown = [f"{row['set']} {row['metric']}: {row['value']}{end}" for row, end in zip(rows, ends, strict=True)]
    return [*shown, f"rows: {', '.join(_folders(result))}"]


def _folders(result: RunResult) -> list[str]:
    return [f"{result.run_dir}/{call_name(name)}" for name in result.parameters["evaluation"]]


def compared(parameters: Mapping[str, Any], other: str, on: Devices) -> list[str]:
    """Evaluate a model and an `other`; return lines with the differences. Files are in the first run's folder.

    Both models get the same prompts and random numbers.
    """
    others = {name: value for name, value in parameters["actor"].items() if name != "adapter"}
    second = {**parameters, "actor": actor_of(other, others)}
    planned(second, on)  # a mistake in the second is found before the first has run
    results = [measured(parameters, on), measured(second, on)]
    first, second_folder = (local_path(result.run_dir, "run_dir") for result in results)
    actor = parameters["actor"]
    names = (str((actor.get("adapter") or actor)["path"]), other)
    same = have_same_text(*names)
    sets, differences = _read(evaluate.validate_parameters(dict(parameters)), (first, second_folder), same_tokens=same)
    remark = "" if same else OTHER_TOKENS
    text = page(names, differences, sets, remark)
    file = write_against(first, sets, text)
    with quiet_process(new_log(first.parent)):
        show_against([each.row for each in differences], text)
    note = [remark] if remark else []
    return [f"{names[0]} -> {names[1]}", *note, *map(str, differences), f"where they differ most: {file}"]


def _read(
    checked: Mapping[str, Any], folders: tuple[Path, Path], *, same_tokens: bool
) -> tuple[list[Answered], list[Difference]]:
    """Read the sets of two runs. Raises InvalidInput for rows that are not there."""
    sets: list[Answered] = []
    differences: list[Difference] = []
    for name, one in checked["evaluation"].items():
        if not isinstance(one, EvaluationSet):
            raise InvalidInput(f"evaluation.{name}", one, "a set of prompts")
        answered = Answered.read(name, *folders, one.samples)
        sets.append(answered)
        settings = one.recorded(name, one.max_new_tokens or 1)  # no difference depends on the longest response
        differences += answered.differences(settings, same_tokens=same_tokens)
    return sets, differences
