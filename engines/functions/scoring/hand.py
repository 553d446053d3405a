"""A worker that scores rows, from the pool's side: its functions, and its calls in flight."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prefect_rlhf.engines.functions.call import late
from prefect_rlhf.engines.functions.function import NamedFunction
from prefect_rlhf.engines.functions.heard import reader_of
from prefect_rlhf.engines.functions.process import WorkerProcess
from prefect_rlhf.engines.functions.scores import Verdict
from prefect_rlhf.engines.functions.scoring.messages import Begun, Done, Job, Loaded, Loading, Said, Start
from prefect_rlhf.engines.functions.scoring.work import Call
from prefect_rlhf.engines.functions.staff import GRACE_SECONDS, Hand
from prefect_rlhf.errors.blame import described
from prefect_rlhf.errors.errors import InvalidInput

Settled = tuple[Call, Sequence[Verdict]]
read = reader_of(Said)


class ScoringHand(Hand[Loading | Loaded | Begun | Done, Settled]):
    """A worker process and its calls."""

    def __init__(self, start: Start, start_seconds: float) -> None:
        super().__init__(WorkerProcess(start, read, "scoring.worker"), start_seconds)
        self._start = start
        self._loading = 0
        self.loaded: list[Loaded] = []
        self._calls: dict[int, Call] = {}
        self._begun: dict[int, float] = {}

    @property
    def is_ready(self) -> bool:
        """Whether it has imported its functions."""
        return len(self.loaded) == len(self._start.functions)

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    @property
    def idle(self) -> bool:
        return self.is_ready and not self.busy

    @property
    def begun(self) -> Sequence[Call]:
        """The calls that have begun."""
        return [self._calls[number] for number in self._begun]

    @property
    def not_begun(self) -> Sequence[Call]:
        """The calls that the worker has been given but has not begun."""
        return [call for number, call in self._calls.items() if number not in self._begun]

    @property
    def place(self) -> str:
        """The `file:line in name` of the function being called; empty between calls."""
        return next((self.loaded[call.function].place for call in (*self.begun, *self.not_begun)), "")

    @property
    def due(self) -> float:
        """The deadline of the worker's next message."""
        if self.idle:
            return math.inf
        if not self._begun:
            return self._since + self._start_seconds
        grace = GRACE_SECONDS if any(self.loaded[call.function].asynchronous for call in self.begun) else 0.0
        return min(self._begun.values()) + self._start.deadline_seconds + grace

    @property
    def lateness(self) -> str:
        """How long the worker has been silent, in words."""
        return late(self._start.deadline_seconds, "") if self.is_ready and self._begun else self.silence

    @property
    def importing(self) -> NamedFunction:
        """The function that it imports, until it is ready."""
        return self._start.functions[self._loading]

    def give(self, calls: Sequence[Call], rows: Sequence[Mapping[str, Any]]) -> None:
        """Send calls of a function to an idle worker. Raises InvalidInput for rows that cannot be sent."""
        self._calls, self._since = dict(enumerate(calls)), time.monotonic()
        of_calls = {number: tuple(rows[row] for row in call.rows) for number, call in self._calls.items()}
        try:
            self.process.give(Job(calls[0].function, of_calls))
        except Exception as error:  # pickling a foreign object may raise anything
            raise InvalidInput("rows", described(error), "columns of plain Python values that pickle") from error

    def _may_come(self, said: Loading | Loaded | Begun | Done) -> bool:
        if isinstance(said, Begun):
            return said.call in self._calls and said.call not in self._begun
        if isinstance(said, Done):
            return said.call in self._begun and len(said.verdicts) == len(self._calls[said.call].rows)
        return not self.is_ready and said.function == len(self.loaded)

    def _taken(self, said: Loading | Loaded | Begun | Done) -> Iterator[Settled]:
        if isinstance(said, Loading):
            self._loading = said.function
        elif isinstance(said, Loaded):
            self.loaded.append(said)
        elif isinstance(said, Begun):
            self._begun[said.call] = self._since
        else:
            del self._begun[said.call]
            yield self._calls.pop(said.call), said.verdicts
