"""All runs below a folder as a table: state, steps, parameters that differ, and metrics."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short, one_line
from prefect_rlhf.errors.table import table
from prefect_rlhf.files.foreign_file import finished_lines
from prefect_rlhf.files.path_text import from_here
from prefect_rlhf.files.remote_path import local_path, shown
from prefect_rlhf.flows.training.run_folder import read_result
from prefect_rlhf.tasks.checkpoints.elsewhere import recall_records
from prefect_rlhf.tasks.reporting.run_record import OWNER, RunRecord, read_parameters, state_of
from prefect_rlhf.tasks.reporting.step_line import shown_metrics
from prefect_rlhf.tasks.settings import by_dotted_name

DEEPEST = 4  # levels of folders between the folder and a run
NOT_COMPARED = ("output_dir", "steps")  # the first is in the name of a run, the second is its `of`
LONGEST_CELL = 40  # characters, in print

Row = Mapping[str, Any]


class Runs(tuple[Row, ...]):
    """A table of runs, oldest first. Each row is a frozen mapping, and all rows have the same keys.

    `pandas.DataFrame(runs)` takes it as it is. `run` is the folder. `state` is completed, running, stopped or failed,
    and `why` says why a run stopped or failed. `steps` out of `of` steps are finished. `began` is in UTC. Then come the
    parameters in which the runs differ, such as `algo.optimizer.lr`, the metrics of the last step and of the last
    evaluation, and with `best_metric` the best value and its step. A missing value is None.
    """

    skipped: tuple[str, ...]
    """A line for each run whose folder cannot be read."""

    def __new__(cls, rows: Iterable[Row] = (), skipped: Sequence[str] = ()) -> Runs:
        """Make a table of rows."""
        made = super().__new__(cls, rows)
        made.skipped = tuple(skipped)
        return made

    def __repr__(self) -> str:
        text = table([dict(zip(self._shown, cells, strict=True)) for cells in self._cells()]) if self else "no runs"
        return "\n".join([text, *(f"skipped: {line}" for line in self.skipped)])

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the table as notebooks show it."""
        heads = "".join(f"<th>{escape(name)}</th>" for name in (self._shown or ["no runs"]))
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in cells) for cells in self._cells())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        notes = "".join(f"<p>skipped: {escape(line)}</p>" for line in self.skipped)
        return f"<table><tr>{heads}</tr>{body}</table>{notes}"

    @property
    def _shown(self) -> list[str]:
        """The columns that have a value in some row."""
        return [name for name in (self[0] if self else ()) if any(_cell(row[name], name) for row in self)]

    def _cells(self) -> Iterator[list[str]]:
        yield from ([_cell(row[name], name) for name in self._shown] for row in self)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run as read: its first columns, parameters by dotted name, and metrics."""

    first: Mapping[str, Any]
    parameters: Mapping[str, Any]
    last: Mapping[str, Any]


def runs(folder: str | Path = "runs") -> Runs:
    """List all runs below a folder, such as your `output_dir`, as a table with the oldest run first.

    Raises InvalidInput for a folder that does not exist. A run that cannot be read is left out, and the table's
    `skipped` says why.
    """
    place = local_path(str(folder), "folder").expanduser()
    recall_records(place)
    if not place.is_dir():
        raise InvalidInput("folder", str(folder), "a folder of runs, such as an output_dir")
    read, skipped = [], []
    for each in sorted(_folders(place, DEEPEST)):
        try:
            read.append(_read(each))
        except (InvalidInput, OSError) as error:
            skipped.append(one_line(f"{from_here(shown(each))}: {error}"))
    read.sort(key=lambda run: (str(run.first["began"]), run.first["run"]))
    metrics = list(dict.fromkeys(name for run in read for name in run.last))
    differing, taken = _differing(read), {*metrics, *(name for run in read for name in run.first)}
    columns = {name: f"parameters.{name}" if name in taken else name for name in differing}
    rows = [
        {column: run.parameters.get(name) for name, column in columns.items()}
        | {name: run.last.get(name) for name in metrics}
        for run in read
    ]
    return Runs((MappingProxyType({**run.first, **row}) for run, row in zip(read, rows, strict=True)), skipped)


def _folders(folder: Path, levels: int) -> Iterator[Path]:
    """Yield the folders of runs at or below a folder; links, such as `latest`, are left out."""
    if (folder / OWNER).is_file():
        yield folder
    elif levels >= 0:
        with os.scandir(folder) as entries:
            below = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
        for each in below:
            yield from _folders(each, levels - 1)


def _read(run_dir: Path) -> _Run:
    record = RunRecord.read(run_dir)
    state, why = state_of(run_dir, record)
    metrics = list(finished_lines("metrics.jsonl", run_dir / "metrics.jsonl"))
    evaluated = list(finished_lines("evaluation.jsonl", run_dir / "evaluation.jsonl"))
    of_evaluation = {name for line in evaluated for name in line} - {"step"}
    last = shown_metrics({name: value for name, value in (metrics or [{}])[-1].items() if name not in of_evaluation})
    last |= {f"held_out_{name}": value for name, value in shown_metrics((evaluated or [{}])[-1]).items()}
    best = (read_result(run_dir) or {}).get("best") or {}
    last |= {"best": best["value"], "best_step": best["step"]} if best else {}
    first = {"run": from_here(shown(run_dir)), "algorithm": record.algorithm, "state": state, "why": why}
    return _Run(
        first | {"steps": len(metrics), "of": record.steps, "began": datetime.fromisoformat(record.began)},
        by_dotted_name(read_parameters(run_dir)),
        last,
    )


def _differing(read: Sequence[_Run]) -> list[str]:
    """Return the names of the parameters that differ: a missing one only between runs of the same algorithm."""
    names = dict.fromkeys(name for run in read for name in run.parameters if name not in NOT_COMPARED)
    return [name for name in names if _differs(name, read)]


def _differs(name: str, read: Sequence[_Run]) -> bool:
    having = {run.first["algorithm"] for run in read if name in run.parameters}
    values = [run.parameters.get(name) for run in read if run.first["algorithm"] in having]
    return any(value != values[0] for value in values)


def _cell(value: Any, name: str) -> str:
    if value is None or value == []:  # no changes, no trackers
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, datetime):
        return f"{value.astimezone():%Y-%m-%d %H:%M}"
    text = one_line(in_short(value, str))
    return text if len(text) <= LONGEST_CELL or name == "run" else f"{text[: LONGEST_CELL - 1]}…"
