"""The pool of plays: opens a play for each row in some worker, passes turns on, and begins lost plays again.

A restarted play gets its earlier turns from a list as long as it asks the same, so the model repeats no turn. Not
thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prefect_rlhf.engines.engine import PlaySettings
from prefect_rlhf.engines.functions.load import at
from prefect_rlhf.engines.functions.plays.hand import PlayHand
from prefect_rlhf.engines.functions.plays.messages import Asks, Failed, Open, Over, Told
from prefect_rlhf.engines.functions.signatures.play_function import WITH_OPENING
from prefect_rlhf.engines.functions.staff import Staff

Event = Asks | Over | Failed


def check_play(settings: PlaySettings) -> Sequence[Mapping[str, Any]]:
    """Import a play in a worker; return its tool schemas. Raises InvalidInput for code that is not a play."""
    pool = PlayPool(settings)
    try:
        return pool.load()
    finally:
        pool.close()


@dataclass(slots=True)
class OpenPlay:
    """A row's unfinished play: what it asked and was told, and how often it failed."""

    opening: Open
    asked: list[Asks] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    again: int = 0  # the turns that it has asked for since it last began
    tries: int = 0


class PlayPool(Staff[PlayHand, Event]):
    """Processes that run plays. They start at the first use, and end whenever and however the pool's process ends."""

    def __init__(self, settings: PlaySettings) -> None:
        super().__init__()
        self.settings = settings
        self._plays: dict[int, OpenPlay] = {}
        self._waiting: deque[int] = deque()  # numbers of plays without a worker; those that begin again are first
        self._alone: deque[int] = deque()  # those that must be tried alone

    def open(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Begin a play for each row; its number is the row's place. Plays of an earlier call are dropped."""
        if self._plays:
            self.close()
        left = self.settings.max_tokens, self.settings.max_turns
        self._plays = {number: OpenPlay(Open(number, row, left)) for number, row in enumerate(rows)}
        self._waiting.extend(self._plays)
        self._staff()

    def tell(self, told: Told) -> None:
        """Give a play the model's turn."""
        play = self._plays.get(told.play)
        if play is None:
            return
        play.told.append(told)
        if play.again == len(play.told):  # else it has begun again, and will hear this turn from the list
            for hand in self._hands:
                hand.tell(told)

    def has_begun(self, number: int) -> bool:
        """Whether a play has been opened in a worker, or has ended; others begin once a worker has room."""
        return number not in self._waiting and number not in self._alone

    def drop(self, number: int) -> None:
        """End a play early."""
        del self._plays[number]
        for waiting in (self._waiting, self._alone):
            if number in waiting:  # its worker ended after it asked
                waiting.remove(number)
        for hand in self._hands:
            hand.close(number)

    def events(self, seconds: float) -> list[Event]:
        """Return the plays' messages in order of arrival, after at most `seconds` without a message.

        Raises InvalidInput for a function that cannot be imported or is not a play.
        """
        try:
            self._staff()
            heard = list(self._turn(seconds))
            self._staff()  # so that `has_begun` holds for each play with room
            return heard
        except BaseException:
            self.close()
            raise

    def load(self) -> Sequence[Mapping[str, Any]]:
        """Import the play in a first worker; return its tool schemas. Raises InvalidInput if it is refused."""
        return self.ready_hand().schemas

    def close(self) -> None:
        """Kill every worker, and drop all plays. The pool can be used again."""
        super().close()
        self._plays.clear()
        self._waiting.clear()
        self._alone.clear()

    def _hired(self) -> PlayHand:
        return PlayHand(self.settings)

    def _staff(self) -> None:
        """Give waiting plays to workers with room, the emptiest first; start workers while there are too few."""
        for hand in self._hands:
            if self._alone and hand.can_try:
                hand.open(self._begun(self._alone.popleft()), alone=True)
        while self._waiting or self._alone:
            free = [hand for hand in self._hands if hand.room > 0]
            busy = not free or min(len(hand.plays) for hand in free) > 0
            if busy and len(self._hands) < self.settings.workers:
                self._hands.append(self._hired())
                if self._alone:
                    self._hands[-1].open(self._begun(self._alone.popleft()), alone=True)
                continue
            if not free or not self._waiting:
                return
            emptiest = min(free, key=lambda hand: len(hand.plays))
            emptiest.open(self._begun(self._waiting.popleft()))

    def _begun(self, number: int) -> Open:
        play = self._plays[number]
        play.again = 0
        return play.opening

    def _heard(self, hand: PlayHand) -> Iterator[Event]:
        for event in hand.hear():
            play = self._plays.get(event.play)
            if play is None:  # it was dropped meanwhile
                continue
            if not isinstance(event, Failed) and self._is_disorder(play, event):
                hand.close(event.play)
                event = Failed(event.play, at("its process said something out of order", hand.place))
            if isinstance(event, Asks):
                yield from self._asked(hand, play, event)
                continue
            was_alone = hand.suspect == event.play
            hand.acquit(event.play)
            if isinstance(event, Failed):
                yield from self._failed(event, was_alone)
            else:
                del self._plays[event.play]
                yield event

    def _is_disorder(self, play: OpenPlay, said: Asks | Over) -> bool:
        """Whether a play cannot have said this now; a person's code may write such a line to the socket."""
        if play.again > len(play.told):  # it waits for the model
            return True
        if isinstance(said, Over):
            return play.again == 0 or not all(0 <= turn < play.again for turn in said.rewards)
        if said.turn == 0:
            may_open = self.settings.signature in WITH_OPENING and isinstance(said.answer, str)
            return play.again != 0 or not (said.answer is None or may_open)
        return said.turn != play.again or said.answer is None

    def _asked(self, hand: PlayHand, play: OpenPlay, asks: Asks) -> Iterator[Event]:
        """Pass a question on, or answer it from the list if the play has begun again."""
        number = play.again
        play.again += 1
        if number == len(play.asked):
            play.asked.append(asks)
            hand.acquit(asks.play)
            yield asks
        elif play.asked[number] != asks:
            self.drop(asks.play)
            yield Failed(asks.play, at("it answered differently when it began again", hand.place))
        elif number < len(play.told):
            hand.tell(play.told[number])
        else:
            hand.acquit(asks.play)

    def _failed(self, failed: Failed, alone: bool) -> Iterator[Event]:
        """Begin a failed play again, or report that it has failed for good."""
        play = self._plays[failed.play]
        play.tries += 1
        if play.tries > self.settings.retries:
            yield self._over(failed)
        else:
            self._alone.append(failed.play) if alone else self._waiting.appendleft(failed.play)

    def _lost(self, hand: PlayHand, is_late: bool, how: str) -> Iterator[Event]:
        """Begin the plays of a lost worker again: those that were running alone, unless there was a single one."""
        # Plays share a process, so its death does not show which is to blame. Each suspect begins again while no other
        # play's code runs beside it, and only the death of that process counts as its failure.
        running = hand.running
        self._waiting.extendleft(number for number in reversed(hand.plays) if number not in running)
        if len(running) == 1:
            yield from self._failed(Failed(running[0], how), alone=True)
        else:
            self._alone.extend(running)

    def _over(self, failed: Failed) -> Failed:
        del self._plays[failed.play]
        return failed
