"""A worker of plays from the pool's side: its process, its open plays, and when its next message is due."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect_rlhf.engines.engine import PlaySettings
from prefect_rlhf.engines.functions.heard import reader_of
from prefect_rlhf.engines.functions.plays.bounds import AnswerBounds
from prefect_rlhf.engines.functions.plays.messages import (
    Asks,
    Begin,
    Close,
    Failed,
    Open,
    Over,
    Ready,
    Said,
    Told,
)
from prefect_rlhf.engines.functions.process import WorkerProcess, search_path
from prefect_rlhf.engines.functions.signatures.play_function import PlayFunction
from prefect_rlhf.engines.functions.staff import GRACE_SECONDS, Hand
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.files.processes.environment import HARMLESS

read = reader_of(Said)


class PlayHand(Hand[Ready | Asks | Over | Failed, Asks | Over | Failed]):
    """A worker process and its open plays."""

    def __init__(self, settings: PlaySettings) -> None:
        names = (*HARMLESS, *settings.environment_variables)
        passed = {name: os.environ[name] for name in names if name in os.environ}
        self._function = function = PlayFunction.of(settings)
        path = (str(Path.cwd()),) if function.python else search_path()
        answers = AnswerBounds(settings.max_answer_tokens, settings.overlong_answers)
        begin = Begin(function, path, settings.deadline_seconds, settings.play_seconds, answers)
        try:
            process = WorkerProcess(begin, read, "plays.worker", passed, function.python)
        except OSError as error:
            if not function.python:
                raise
            right = f"the path of a Python interpreter ({error.strerror})"
            raise InvalidInput("play.python", function.python, right) from error
        super().__init__(process, settings.start_seconds)
        self._ready: Ready | None = None  # until the play function is imported
        self.plays: dict[int, float] = {}  # since when the code of each play runs; infinity while it waits
        # The worker knows plays by other numbers. Each play has a new one there, and so has its second try: else a task
        # that a play left behind could speak into another row.
        self._numbers: dict[int, int] = {}  # of open plays, there
        self._of_number: dict[int, int] = {}  # the other way round
        self._opened = 0
        # The play that is tried alone. Until it asks or ends, no other play's code runs.
        self.suspect: int | None = None
        self._held: list[Told] = []  # to other plays, meanwhile
        self._settings = settings

    @property
    def room(self) -> int:
        """How many more plays it may open."""
        return 0 if self.suspect is not None else self._settings.at_once - len(self.plays)

    @property
    def is_ready(self) -> bool:
        """Whether the worker has imported the play function."""
        return self._ready is not None

    @property
    def importing(self) -> PlayFunction:
        """The play function."""
        return self._function

    @property
    def place(self) -> str:
        """The `file:line in name` of the play function; empty until it is imported."""
        return self._ready.place if self._ready else ""

    @property
    def schemas(self) -> Sequence[Mapping[str, Any]]:
        """The schemas of its play's tools."""
        return self._ready.schemas if self._ready else ()

    @property
    def due(self) -> float:
        """The deadline of the worker's next message."""
        if not self.is_ready:
            return self._since + self._start_seconds
        return min(self.plays.values(), default=math.inf) + self._settings.deadline_seconds + GRACE_SECONDS

    @property
    def lateness(self) -> str:
        """How long the worker has been silent, in words."""
        if not self.is_ready:
            return self.silence
        return f"no answer after {self._settings.deadline_seconds:g} s, and its process did not end it"

    @property
    def running(self) -> list[int]:
        """The plays with code that may be running now."""
        return [number for number, since in self.plays.items() if since < math.inf]

    @property
    def can_try(self) -> bool:
        """Whether it has room and the play would be alone: no other play's code is running or about to run."""
        return self.room > 0 and (not self.plays or (self.is_ready and not self.running))

    def open(self, message: Open, *, alone: bool = False) -> None:
        """Begin a play; `alone` means that it may have killed a worker."""
        if alone:
            self.suspect = message.play
        self.plays[message.play] = time.monotonic() if self.is_ready else math.inf
        self._numbers[message.play], self._of_number[self._opened] = self._opened, message.play
        self._opened += 1
        self._give(message)

    def tell(self, told: Told) -> None:
        """Give an open play the model's turn."""
        if told.play not in self.plays:
            return
        if self.suspect not in (None, told.play):
            self._held.append(told)
            return
        self.plays[told.play] = time.monotonic()
        self._give(told)

    def acquit(self, play: int) -> None:
        """Let other plays continue, because this play has passed the point at which the worker died, or has ended."""
        if play == self.suspect:
            self.suspect, held, self._held = None, self._held, []
            for told in held:
                self.tell(told)

    def close(self, play: int) -> None:
        """End an open play; it sends no more messages."""
        if self.plays.pop(play, None) is not None:
            self._give(Close(play))
            self._forget(play)
        self.acquit(play)

    def not_imported(self, why: str) -> InvalidInput:
        """Return the error for a worker that ended while importing the play function."""
        function = self._function
        if function.python:
            right = f"an interpreter that can import {function.function}: {why}"
            return InvalidInput("play.python", function.python, right)
        return super().not_imported(why)

    def _may_come(self, said: Ready | Asks | Over | Failed) -> bool:
        if isinstance(said, Ready):
            return not self.is_ready
        return self.is_ready and 0 <= said.play < self._opened

    def _taken(self, said: Ready | Asks | Over | Failed) -> Iterator[Asks | Over | Failed]:
        if isinstance(said, Ready):
            self._ready = said
            self.plays = dict.fromkeys(self.plays, time.monotonic())
        elif (play := self._of_number.get(said.play)) is None:
            return  # the worker sent it before it read that the play is closed
        elif isinstance(said, Asks):
            self.plays[play] = math.inf
            yield replace(said, play=play)
        else:
            del self.plays[play]
            self._forget(play)
            yield replace(said, play=play)

    def _give(self, message: Open | Told | Close) -> None:
        self.process.give(replace(message, play=self._numbers[message.play]))

    def _forget(self, play: int) -> None:
        del self._of_number[self._numbers.pop(play)]
