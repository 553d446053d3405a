"""A pool's workers: reads their messages, and kills and reports a worker that ends, hangs or breaks the protocol.

Two protocols use it: workers that score rows (`scoring`), and workers with plays that talk with a model (`plays`).
"""

from __future__ import annotations

import math
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from prefect_rlhf.engines.functions.function import NamedFunction
from prefect_rlhf.engines.functions.load import at
from prefect_rlhf.engines.functions.message import Refused
from prefect_rlhf.engines.functions.process import WorkerProcess
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short

GRACE_SECONDS = 1.0
"""Seconds for a late call to be ended by its own event loop first."""
_LOOK_SECONDS = 0.5  # between checks that a process lives: its own children may keep its channel open

Said = TypeVar("Said")
Event = TypeVar("Event")


class Hand(ABC, Generic[Said, Event]):
    """A worker from the pool's side; times are in seconds of the monotonic clock."""

    def __init__(self, process: WorkerProcess[Any], start_seconds: float) -> None:
        self.process = process
        self._start_seconds, self._since = start_seconds, time.monotonic()  # since: when it last said something

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the worker has imported its functions."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The `file:line in name` of its function, for messages; empty if unknown."""

    @property
    @abstractmethod
    def importing(self) -> NamedFunction:
        """The function that it imports, until it is ready."""

    @property
    @abstractmethod
    def due(self) -> float:
        """The deadline of its next message."""

    @property
    @abstractmethod
    def lateness(self) -> str:
        """How long the worker has been silent, in words."""

    @abstractmethod
    def _may_come(self, said: Said) -> bool:
        """Return whether the worker may send this message now. A person's function may write such a line too."""

    @abstractmethod
    def _taken(self, said: Said) -> Iterator[Event]:
        """Note a message, and yield its events."""

    def hear(self) -> Iterator[Event]:
        """Yield the events of its new messages. Raises InvalidInput for a function that it refuses."""
        for said in self.process.hear():
            if isinstance(said, Refused) and not self.is_ready:
                raise InvalidInput(said.field, said.seen, said.expected)
            if isinstance(said, Refused) or not self._may_come(said):
                self.process.nonsense = in_short(said)
                return
            self._since = time.monotonic()
            yield from self._taken(said)

    @property
    def silence(self) -> str:
        """How long a worker that imports, or reads its calls, has been silent, in words."""
        settings = self.importing.field.partition(".")[0]
        return f"no message from its process for {self._start_seconds:g} s; {settings}.start_seconds gives it more"

    def not_imported(self, why: str) -> InvalidInput:
        """Return the error for a worker that ended while importing a function."""
        function = self.importing
        return InvalidInput(function.field, function.function, f"a module that can be imported: {why}")

    def last_words(self, how: str) -> str:
        """Say how the worker ended, with the end of its output. Raises InvalidInput if it was importing a function."""
        if not self.is_ready:
            raise self.not_imported(how + self.process.last_words())
        return at(how, self.place) + self.process.last_words()

    def dismiss(self) -> None:
        """Kill its process and wait for its end."""
        self.process.kill()
        self.process.reap()


AHand = TypeVar("AHand", bound=Hand[Any, Any])


class Staff(ABC, Generic[AHand, Event]):
    """A pool's workers. They end with `close`, after an error, and whenever and however the pool's process ends."""

    def __init__(self) -> None:
        self._hands: list[AHand] = []

    @abstractmethod
    def _hired(self) -> AHand:
        """Start a worker."""

    @abstractmethod
    def _heard(self, hand: AHand) -> Iterator[Event]:
        """Yield the events of a worker's new messages."""

    @abstractmethod
    def _lost(self, hand: AHand, is_late: bool, how: str) -> Iterator[Event]:
        """Yield the events that follow from losing a dismissed worker; `how` it ended, in words for an error."""

    def close(self) -> None:
        """Kill every worker. The pool can be used again."""
        hands, self._hands = self._hands, []
        for hand in hands:
            hand.process.kill()
        for hand in hands:
            hand.process.reap()

    def ready_hand(self) -> AHand:
        """Return a worker that has imported the functions, starting a worker if the pool has no worker.

        Raises InvalidInput for a function that cannot be imported or used.
        """
        while True:
            for hand in self._hands:
                if hand.is_ready:
                    return hand
            if not self._hands:
                self._hands.append(self._hired())
            for _ in self._turn(math.inf):  # a worker's own deadline ends the wait
                pass

    def _turn(self, seconds: float) -> Iterator[Event]:
        """Wait for a message, a deadline, or at most `seconds`; then yield the events of all workers."""
        if self._hands:
            due = min(hand.due for hand in self._hands)
            exchange([hand.process for hand in self._hands], min(seconds, due - time.monotonic()))
        for hand in tuple(self._hands):
            yield from self._heard(hand)
            how, is_late = hand.process.ended(), False
            if not how and hand.due < time.monotonic():
                yield from self._heard(hand)  # this thread may be late itself
                is_late = hand.due < time.monotonic()
            if how or is_late:
                yield from self._heard(hand)  # its last messages
                self._hands.remove(hand)
                hand.dismiss()
                yield from self._lost(hand, is_late, hand.last_words(how or hand.lateness))


def exchange(processes: Iterable[WorkerProcess[Any]], seconds: float) -> None:
    """Wait for workers for at most `seconds`; send as much as they accept and read their output."""
    poller, outputs, senders = select.poll(), {}, {}
    for process in processes:
        if not process.hung_up:
            poller.register(process.channel, select.POLLIN | (select.POLLOUT if process.unsent else 0))
            senders[process.channel.fileno()] = process
        if not process.silent:
            poller.register(process.output, select.POLLIN)
            outputs[process.output] = process
    for descriptor, _ in poller.poll(1000 * max(0.0, min(seconds, _LOOK_SECONDS))):
        if descriptor in outputs:
            outputs[descriptor].drain()
        else:
            senders[descriptor].send()
