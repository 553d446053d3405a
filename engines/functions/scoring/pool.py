"""The pool: sends calls to workers, kills workers that hang, and collects the functions' values for each row.

`check_function` runs a function on a few rows in the same way, for its author.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from prefect_rlhf.engines.functions.function import OF_ROWS, START_SECONDS, HostFunction, HostSettings
from prefect_rlhf.engines.functions.process import search_path
from prefect_rlhf.engines.functions.scores import HostScores, RowFailure
from prefect_rlhf.engines.functions.scoring.hand import ScoringHand, Settled
from prefect_rlhf.engines.functions.scoring.messages import Loaded, Start
from prefect_rlhf.engines.functions.scoring.work import Work
from prefect_rlhf.engines.functions.staff import Staff
from prefect_rlhf.errors.errors import InvalidInput, RlhfError
from prefect_rlhf.errors.in_short import one_line

CONCURRENT = 16
"""Async calls that a worker runs at a time."""

Rows = Sequence[Mapping[str, Any]]


class HostFunctionFailed(RlhfError):
    """Your function failed on more rows than `most_failed` allows. The message names it, its file and a reason."""


class HostPool(Staff[ScoringHand, Settled]):
    """Worker processes that call your functions on rows.

    They start when the pool is first used. They end with `close`, after an error, and however the pool's own process
    ends. Not thread-safe.
    """

    def __init__(self, functions: Sequence[HostFunction], settings: HostSettings) -> None:
        super().__init__()
        self.functions, self.settings = tuple(functions), settings
        self._work: Work | None = None  # of the `score` that runs

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def score(self, rows: Rows, doing: str) -> HostScores:
        """Call every function on every row. Errors mention `doing`, the purpose of the call.

        Raises InvalidInput for a function that cannot be called at all or a column that the rows lack, and
        HostFunctionFailed once more than `most_failed` of the rows have failed.
        """
        began = time.monotonic()
        self._work = work = Work(self.functions, len(rows), self.settings.retries)
        if not work.done:
            try:
                self._staff(work.waiting)
                functions = self.load()
                for function, loaded in zip(self.functions, functions, strict=True):
                    _require_columns(function, loaded, rows)
                self._finish(work, rows, doing, [loaded.asynchronous for loaded in functions])
            except BaseException:
                self.close()
                raise
        seconds = time.monotonic() - began
        values = work.values(self.settings.value_of_failed)
        return HostScores(values, work.failures(), seconds, work.metrics(), work.answers())

    def load(self) -> Sequence[Loaded]:
        """Import the functions in a worker, if that has not been done. Raises InvalidInput if a function is refused."""
        try:
            return self.ready_hand().loaded
        except BaseException:
            self.close()
            raise

    def _finish(self, work: Work, rows: Rows, doing: str, asynchronous: Sequence[bool]) -> None:
        while not work.done:
            self._staff(work.waiting)
            for hand in self._hands:
                calls = work.take(self.settings.workers, asynchronous) if hand.idle else ()
                if calls:
                    hand.give(calls, rows)
            for call, verdicts in self._turn(math.inf):
                work.settle(call, verdicts)
            if len(work.failed_rows) > self.settings.most_failed * len(rows):
                raise self._too_many(work.failures(), len(rows), doing)

    def _staff(self, calls: int) -> None:
        """Start workers until each of `calls` and each running call has a worker, at most `settings.workers`."""
        busy = sum(hand.busy for hand in self._hands)
        while len(self._hands) < min(self.settings.workers, busy + calls):
            self._hands.append(self._hired())

    def _hired(self) -> ScoringHand:
        start = Start(self.functions, search_path(), self.settings.deadline_seconds, CONCURRENT)
        return ScoringHand(start, self.settings.start_seconds)

    def _heard(self, hand: ScoringHand) -> Iterator[Settled]:
        return hand.hear()

    def _lost(self, hand: ScoringHand, is_late: bool, how: str) -> Iterator[Settled]:
        """Record the loss of a worker in the work: its calls are made again, or fail."""
        if self._work is not None and hand.busy:
            if is_late:
                for function in {call.function for call in hand.begun if len(call.rows) > 1}:
                    self._work.split(function)
            self._work.lose(hand.begun, hand.not_begun, how)
        yield from ()

    def _too_many(self, failures: Sequence[RowFailure], rows: int, doing: str) -> HostFunctionFailed:
        worst = max(self.functions, key=lambda f: sum(failure.function == f.name for failure in failures))
        of_worst = [failure for failure in failures if failure.function == worst.name]
        return HostFunctionFailed(
            one_line(
                f"{doing}: {worst.name} ({worst.function}) failed on {len(of_worst)} of {rows} rows, at most"
                f" {self.settings.most_failed:.0%} may; row {of_worst[0].row}: {of_worst[0].reason}"
            )
        )


def _require_columns(function: HostFunction, loaded: Loaded, rows: Rows) -> None:
    """Raise InvalidInput for a column that a function needs and a row lacks."""
    for number, row in enumerate(rows):
        lacking = function.lacking(loaded.named, {*row, *(("completion_ids",) if "response_ids" in row else ())})
        if lacking:
            expected = f"a column {lacking[0]}, which {function.function} needs"
            raise InvalidInput(f"{function.field}: row {number}", sorted(map(str, row)), expected)


def check_function(
    function: HostFunction, columns: Collection[str] | None = None, seconds: float = START_SECONDS
) -> None:
    """Raise InvalidInput if `function` cannot be imported, is not a function, or takes other arguments.

    If you pass a dataset's `columns`, also if the function needs a column that is missing there.
    """
    with HostPool((function,), HostSettings(workers=1, start_seconds=seconds)) as pool:
        (loaded,) = pool.load()
    if columns is not None:
        check_columns(function, loaded, columns)


def check_columns(function: HostFunction, loaded: Loaded, columns: Collection[str], dataset: str = "prompts") -> None:
    """Raise InvalidInput if an imported function needs a column that a dataset with these `columns` lacks.

    The error explains how the parameter `dataset` renames columns.
    """
    lacking = function.lacking(loaded.named, {*columns, *OF_ROWS, "completion_ids"})
    if lacking:
        names = ", ".join(f"{name}: COLUMN" for name in lacking)
        remedy = f"a column of another name is given by {dataset}.columns: {{{names}}}"
        expected = f"a dataset with a column {lacking[0]}, which {function.function} needs; {remedy}"
        raise InvalidInput(function.field, sorted(columns), expected)
