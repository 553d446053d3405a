"""The open calls of a `score`, and what follows when calls fail: only values, no processes.

A row's failure counts only if the row was called alone, without other calls in its process. After the failure of a
batch, or the death of a process with several async calls, each row is called again on its own.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prefect_rlhf.engines.functions.function import HostFunction
from prefect_rlhf.engines.functions.scores import RowFailure, Verdict, mean

BATCH_ROWS = 16
"""Rows per call of a batched function: a constant, so that calls are the same for any number of workers."""
_MOST_SYNC, _MOST_ASYNC = 16, 64  # calls in a message to a worker


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function for some rows. `tries` earlier calls failed; an `alone` call needs its own process."""

    function: int
    rows: tuple[int, ...]
    tries: int = 0
    alone: bool = False


class Work:
    """A `score`'s open calls, and the verdicts of finished calls."""

    def __init__(self, functions: Sequence[HostFunction], rows: int, retries: int) -> None:
        self.rows, self._retries, self._names = rows, retries, [function.name for function in functions]
        self._verdicts: list[list[Verdict | None]] = [[None] * rows for _ in functions]
        self._waiting = [
            deque(_batches(number, rows, BATCH_ROWS if function.signature == "trl" else 1))
            for number, function in enumerate(functions)
        ]
        self._open = rows * len(functions)
        self.failed_rows: set[int] = set()

    @property
    def done(self) -> bool:
        return self._open == 0

    @property
    def waiting(self) -> int:
        """How many calls wait for a worker."""
        return sum(map(len, self._waiting))

    def take(self, workers: int, asynchronous: Sequence[bool]) -> tuple[Call, ...]:
        """Take calls of a function for a worker, few enough that each of `workers` gets some."""
        for number, waiting in enumerate(self._waiting):
            if not waiting:
                continue
            most = _MOST_ASYNC if asynchronous[number] else _MOST_SYNC
            most = max(1, min(most, math.ceil(len(waiting) / (2 * workers))))
            taken = [waiting.popleft()]
            while not taken[0].alone and waiting and not waiting[0].alone and len(taken) < most:
                taken.append(waiting.popleft())
            return tuple(taken)
        return ()

    def settle(self, call: Call, verdicts: Sequence[Verdict]) -> None:
        """Record a call's verdicts; a failed row is called again, or has failed for good."""
        for row, verdict in zip(call.rows, verdicts, strict=True):
            if verdict.failed and len(call.rows) > 1:
                self._again(Call(call.function, (row,)))
            elif verdict.held_up and not call.alone:
                self._again(replace(call, alone=True))
            elif verdict.failed and call.tries < self._retries:
                self._again(replace(call, tries=call.tries + 1))
            else:
                self._verdicts[call.function][row] = verdict
                self._open -= 1
                if verdict.failed:
                    self.failed_rows.add(row)

    def lose(self, begun: Sequence[Call], not_begun: Sequence[Call], why: str) -> None:
        """Record the death of a process, with its calls that had begun and those that had not.

        If no call had begun, the next call is blamed, provided that it was alone in the process.
        """
        # Async calls share their process, so its death does not show which of them is to blame. Each suspect is called
        # again alone, and only a second death counts as its failure. Without a call that had begun, the process died
        # before its first one, perhaps while it read the rows.
        suspects, others = (begun, not_begun) if begun else (not_begun[:1], not_begun[1:])
        for call in others:
            self._again(call)
        for call in suspects:
            if call.alone or len(begun) == 1:
                self.settle(call, [Verdict(failed=why)] * len(call.rows))
            else:
                self._again(replace(call, alone=True))

    def split(self, function: int) -> None:
        """From now on, call the function on one row at a time, because a batch missed its deadline."""
        waiting = self._waiting[function]
        self._waiting[function] = deque(
            Call(function, (row,)) if len(call.rows) > 1 else call for call in waiting for row in call.rows
        )

    def failures(self) -> tuple[RowFailure, ...]:
        """Return the failures so far, by function, then by row."""
        return tuple(
            RowFailure(row, name, verdict.failed, verdict.blame)
            for name, verdicts in zip(self._names, self._verdicts, strict=True)
            for row, verdict in enumerate(verdicts)
            if verdict is not None and verdict.failed
        )

    def values(self, of_failed: float) -> Mapping[str, tuple[float | None, ...]]:
        """Return the values by function, after all calls have finished."""
        return {
            name: tuple(of_failed if v is None or v.failed else v.value for v in verdicts)
            for name, verdicts in zip(self._names, self._verdicts, strict=True)
        }

    def answers(self) -> tuple[str | None, ...]:
        """Return each row's answer, from the first function that found an answer in it."""
        by_row = zip(*self._verdicts, strict=True)
        return tuple(next((v.answer for v in row if v and v.answer is not None), None) for row in by_row)

    def metrics(self) -> Mapping[str, float]:
        """Return the means of other numbers that functions returned, over the rows that have them."""
        numbers: dict[str, list[float]] = {}
        for name, verdicts in zip(self._names, self._verdicts, strict=True):
            for verdict in verdicts:
                for key, number in verdict.metrics.items() if verdict else ():
                    numbers.setdefault(f"{name}/{key}", []).append(number)
        return {name: mean(those) for name, those in numbers.items()}

    def _again(self, call: Call) -> None:
        self._waiting[call.function].append(call)


def _batches(function: int, rows: int, most: int) -> list[Call]:
    return [Call(function, tuple(range(first, min(first + most, rows)))) for first in range(0, rows, most)]
