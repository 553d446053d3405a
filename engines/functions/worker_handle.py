"""The pool's handle on a worker: functions loaded, calls in flight, and the deadline of its next message."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect_rlhf.engines.functions.call import late
from prefect_rlhf.engines.functions.function import HostFunction
from prefect_rlhf.engines.functions.load import at
from prefect_rlhf.engines.functions.messages import Begun, Done, Job, Loaded, Loading, Refused, Said, Start, said_in
from prefect_rlhf.engines.functions.process import WorkerProcess
from prefect_rlhf.engines.functions.work import Call, Work
from prefect_rlhf.errors.blame import described
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short

_GRACE = 1.0  # seconds for an async call to be ended by its own event loop first


class Hand:
    """A worker process and its calls; times are of the monotonic clock, in seconds."""

    def __init__(self, start: Start, start_seconds: float) -> None:
        self.process = WorkerProcess(start, said_in)
        self._start, self._start_seconds = start, start_seconds
        self._loading = 0
        self._loaded: list[Loaded] = []
        self._calls: dict[int, Call] = {}
        self._begun: dict[int, float] = {}
        self._since = time.monotonic()

    @property
    def loaded(self) -> Sequence[Loaded] | None:
        """The loaded functions; None until all are imported."""
        return self._loaded if len(self._loaded) == len(self._start.functions) else None

    @property
    def busy(self) -> bool:
        return bool(self._calls)

    @property
    def idle(self) -> bool:
        return self.loaded is not None and not self.busy

    @property
    def due(self) -> float:
        """The deadline of the worker's next message."""
        if self.idle:
            return math.inf
        if not self._begun:
            return self._since + self._start_seconds
        calls = (self._calls[number] for number in self._begun)
        grace = _GRACE if any(self._loaded[call.function].asynchronous for call in calls) else 0.0
        return min(self._begun.values()) + self._start.deadline_seconds + grace

    def give(self, calls: Sequence[Call], rows: Sequence[Mapping[str, Any]]) -> None:
        """Send calls of a function to an idle worker. Raises InvalidInput for rows that cannot be sent."""
        self._calls, self._since = dict(enumerate(calls)), time.monotonic()
        of_calls = {number: tuple(rows[row] for row in call.rows) for number, call in self._calls.items()}
        try:
            self.process.give(Job(calls[0].function, of_calls))
        except Exception as error:  # pickling a foreign object may raise anything
            raise InvalidInput("rows", described(error), "columns of plain Python values that pickle") from error

    def hear(self, work: Work | None) -> None:
        """Process the worker's new messages. Raises InvalidInput for a function that it refuses."""
        for said in self.process.hear():
            if not self._may_come(said):
                self.process.nonsense = in_short(said)
                return
            self._since = time.monotonic()
            self._take(said, work)

    def lost(self, work: Work | None, how: str) -> None:
        """Record the loss of the worker. Raises InvalidInput if it was importing a function."""
        last_words = self.process.last_words()
        if self.loaded is None:
            function = self._start.functions[self._loading]
            raise InvalidInput(function.field, function.function, f"a module that can be imported: {how}{last_words}")
        if work is None or self.idle:
            return
        begun = [self._calls[number] for number in self._begun]
        not_begun = [call for number, call in self._calls.items() if number not in self._begun]
        first = (begun or not_begun)[0]
        place = self._loaded[first.function].place
        work.lose(begun, not_begun, at(how, place) + last_words)

    def lost_late(self, work: Work | None) -> None:
        """Record that the worker sent no message before its deadline and was killed."""
        if self.loaded is None or not self._begun:
            return self.lost(work, f"no message from its process for {self._start_seconds:g} s")
        calls = [self._calls[number] for number in self._begun]
        for function in {call.function for call in calls if len(call.rows) > 1}:
            if work is not None:
                work.split(function)
        return self.lost(work, late(self._start.deadline_seconds, ""))

    def _may_come(self, said: Said) -> bool:
        """Return whether a worker may send this now; a user's function may write such a line too."""
        if isinstance(said, Begun):
            return said.call in self._calls and said.call not in self._begun
        if isinstance(said, Done):
            return said.call in self._begun and len(said.verdicts) == len(self._calls[said.call].rows)
        return self.loaded is None and said.function == len(self._loaded)

    def _take(self, said: Said, work: Work | None) -> None:
        if isinstance(said, Loading):
            self._loading = said.function
        elif isinstance(said, Refused):
            function: HostFunction = self._start.functions[said.function]
            raise InvalidInput(function.field, said.seen, said.expected)
        elif isinstance(said, Loaded):
            self._loaded.append(said)
        elif isinstance(said, Begun):
            self._begun[said.call] = self._since
        elif isinstance(said, Done) and work is not None:
            del self._begun[said.call]
            work.settle(self._calls.pop(said.call), said.verdicts)
