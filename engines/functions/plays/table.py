"""A replica's table of plays: the next orders for engines, and what plays are told about the results.

It counts each row's tokens and turns, and makes the tokens of answers, so that workers handle only text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

from prefect_rlhf.engines.engine import Order, PlayEnd, Turn
from prefect_rlhf.engines.functions.plays.messages import Answer, Asks, End, Failed, Over, Told
from prefect_rlhf.engines.functions.plays.pool import Event, PlayPool
from prefect_rlhf.engines.functions.signatures.play_function import WITH_OPENING
from prefect_rlhf.errors.errors import RlhfError
from prefect_rlhf.errors.in_short import one_line

_LOOK_SECONDS = 0.5


class PlaysFailed(RlhfError):
    """More plays of a replica failed than `most_failed` allows; names the function, the count and a reason."""


class Codec(Protocol):
    """Converts turns and answers between text and tokens; see AnswerTokens. `of` raises an error that gives the reason.

    It returns None for an answer that ends the play.
    """

    def text(self, tokens: Sequence[int]) -> str: ...

    def of(self, answer: Answer, latest: int) -> list[int] | None: ...

    def opened(self, prompt: Sequence[int], opening: str) -> list[int]: ...


@dataclass(slots=True)
class Seat:
    """A row at the table: its remaining tokens and turns, its latest turn, and the question that waits for a turn."""

    tokens_left: int
    turns_left: int
    number: int = 0  # of the turn that was ordered last
    heard: Told | None = None  # that turn, once the model has said it
    asked: bool = False  # whether the play waits for it
    has_begun: bool = False  # its first turn is ordered
    is_over: bool = False
    told_at: float = 0.0  # when the play heard its latest turn
    answers: int = 0
    answer_seconds: float = 0.0  # from each turn to the answer


class Table:
    """A PlayTable. Every row's first turn is ordered at once, unless an environment may add a text to the prompt."""

    def __init__(
        self,
        pool: PlayPool,
        rows: Sequence[Mapping[str, Any]],
        codec: Codec,
        most_of_a_turn: int,
        doing: str,
        clock: Callable[[], float] = time.monotonic,
        prompts: Sequence[Sequence[int]] = (),
    ) -> None:
        self._pool, self._codec, self._most, self._doing, self._clock = pool, codec, most_of_a_turn, doing, clock
        by = pool.settings
        self._seats = [Seat(by.max_tokens, by.max_turns) for _ in rows]
        self._prompts, self._may_open = prompts, by.signature in WITH_OPENING
        self._orders: list[Order] = [] if self._may_open else [self._turn(row, ()) for row in range(len(rows))]
        self.failures: list[Failed] = []
        pool.open(rows)

    def orders(self, wait: Literal["no", "any", "all"]) -> Sequence[Order]:
        """See PlayTable. Raises PlaysFailed, and InvalidInput for a function that is not a play."""
        self._take(0.0)
        while self._is_to_wait(wait):
            self._take(_LOOK_SECONDS)
        orders, self._orders = self._orders, []
        return orders

    def heard(self, row: int, tokens: Sequence[int], is_stopped: bool) -> None:
        """See PlayTable."""
        seat = self._seats[row]
        seat.tokens_left -= len(tokens)
        seat.turns_left -= 1
        end: End = "stop" if is_stopped else "length" if seat.tokens_left > 0 else "budget"
        seat.heard = Told(row, self._codec.text(tokens), tuple(tokens), end, (seat.tokens_left, seat.turns_left))
        if seat.asked:
            self._tell(seat, seat.heard)

    def _tell(self, seat: Seat, told: Told) -> None:
        seat.told_at = self._clock()
        self._pool.tell(told)

    def _turn(self, row: int, answer: Sequence[int]) -> Turn:
        seat = self._seats[row]
        seat.tokens_left -= len(answer)
        seat.has_begun = True
        return Turn(row, seat.number, tuple(answer), min(self._most, seat.tokens_left))

    def _is_to_wait(self, wait: Literal["no", "any", "all"]) -> bool:
        if wait == "all":  # each row waits for the model, is over, or has no worker with room yet
            # At first each row has its turn ordered, before any play asks. Ends of rows are orders too.
            is_first = sum(isinstance(order, Turn) for order in self._orders) == len(self._seats)
            return not is_first and any(map(self._is_awaited, range(len(self._seats))))
        return wait == "any" and not self._orders and not all(seat.is_over for seat in self._seats)

    def _is_awaited(self, row: int) -> bool:
        """Whether a round needs the next words of a row's play."""
        seat = self._seats[row]
        is_heard = seat.is_over or (seat.asked and seat.heard is None)
        return not is_heard and (self._pool.has_begun(row) or not self._orders)

    def _take(self, seconds: float) -> None:
        for event in self._pool.events(seconds):
            self._settle(event)

    def _settle(self, event: Event) -> None:
        seat = self._seats[event.play]
        if isinstance(event, Failed):
            self._fail(event)
        elif isinstance(event, Over):
            score = math.fsum(event.rewards.values()) + (event.score or 0.0)
            is_scored = event.score is not None or event.rewards
            rewards = [event.rewards.get(turn, 0.0) for turn in range(seat.number + 1)]
            rewards[-1] += event.score or 0.0
            self._end(event, score if is_scored else math.nan, rewards)
        elif event.turn == 0 and self._may_open:
            self._open(event, seat)
        elif event.turn == 0:
            seat.asked = True
            if seat.heard is not None:
                self._tell(seat, seat.heard)
        else:
            self._ask(event, seat)

    def _open(self, asks: Asks, seat: Seat) -> None:
        """Order the first turn, after a prompt with the environment's text."""
        prompt = self._prompts[asks.play]
        try:
            opened = prompt if asks.answer is None else self._codec.opened(prompt, cast(str, asks.answer))
            added = len(opened) - len(prompt)
            left = seat.tokens_left
            why = "" if added < left else f"its opening has {added} tokens, and the row may have {left}"
        except Exception as error:  # noqa: BLE001  as in _ask
            why = one_line(f"{error}")
        if why:
            self._pool.drop(asks.play)
            self._fail(Failed(asks.play, why))
            return
        seat.tokens_left -= added
        seat.asked = True
        self._orders.append(replace(self._turn(asks.play, ()), prompt=tuple(opened)))

    def _ask(self, asks: Asks, seat: Seat) -> None:
        """Order the turn that a play asks for, or tell it that the row may have no more."""
        assert seat.heard is not None and asks.answer is not None  # it heard a turn before, and answers it
        seat.answers += 1
        seat.answer_seconds += self._clock() - seat.told_at
        try:
            answer = self._codec.of(asks.answer, seat.heard.tokens[-1])
        except Exception as error:  # noqa: BLE001  a tokenizer and its template may raise anything
            self._pool.drop(asks.play)
            self._fail(Failed(asks.play, one_line(f"{error}")))
            return
        if answer is None or seat.turns_left < 1 or seat.tokens_left <= len(answer):
            self._pool.tell(Told(asks.play, "", (), "budget", (0, 0)))
            return
        seat.number, seat.heard, seat.asked = asks.turn, None, True
        self._orders.append(self._turn(asks.play, answer))

    def _end(self, over: Over, score: float, rewards: Sequence[float]) -> None:
        seat = self._seats[over.play]
        seat.is_over = True
        truncated = over.cut or seat.heard is None or seat.heard.end != "stop"
        answers = seat.answers, seat.answer_seconds
        self._orders.append(PlayEnd(over.play, score, tuple(rewards), False, truncated, over.numbers, *answers))

    def _fail(self, failed: Failed) -> None:
        self.failures.append(failed)
        seat, by = self._seats[failed.play], self._pool.settings
        if len(self.failures) > by.most_failed * len(self._seats):
            first = self.failures[0]
            raise PlaysFailed(
                one_line(
                    f"{self._doing}: play {by.function} failed on {len(self.failures)} of {len(self._seats)}"
                    f" rows, at most {by.most_failed:.0%} may; row {first.play}: {first.reason}"
                )
            )
        seat.is_over = True
        if not seat.has_begun:  # each row has a token
            self._orders.append(replace(self._turn(failed.play, ()), at_most=1))
        rewards = [0.0] * (seat.number + 1)
        score = math.nan if by.failed_value is None else by.failed_value
        rewards[-1] = 0.0 if by.failed_value is None else by.failed_value
        self._orders.append(PlayEnd(failed.play, score, tuple(rewards), by.failed_value is None))
