"""The model, as a play sees it: `said = await say(answer)`, `say.reward(number)`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from prefect_rlhf.engines.functions.plays.messages import Asks, Begin, End, Told, as_answer
from prefect_rlhf.engines.functions.scores import MOST_SCORE, SCORES


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of the model."""

    text: str
    """Without special tokens."""
    tokens: tuple[int, ...]
    """All tokens of the turn."""
    end: End
    """How it ended: "stop" by the model or a stop string, "length" if it was cut at the most tokens of a turn, and
    "budget" if the row may have no more tokens or turns."""
    turn: int
    """Counts from 0."""


class Say:
    """The model for a single row. The play's deadline runs while the play is not waiting for the model."""

    def __init__(
        self,
        play: int,
        left: tuple[int, int],
        begin: Begin,
        ask: Callable[[Asks], None],
        stop: Callable[[], object],
        may_open: bool = False,
    ) -> None:
        self.rewards: dict[int, float] = {}
        self.late = ""
        self.is_cut = False  # whether it was called beyond the row's tokens or turns
        self._play, self._ask, self._stop = play, ask, stop
        self._deadline_seconds, self._seconds_left = begin.deadline_seconds, begin.play_seconds
        self._shortened = begin.answers.shortened
        self._turn, self._is_over = -1, False
        self._left, self._budget, self._may_open = left, left, may_open
        self._has_ended = False  # the play is over
        self._has_asked = False  # the model has a question whose turn the play has not heard
        self._waiting: asyncio.Future[Told] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0

    @property
    def tokens_left(self) -> int:
        """How many tokens the row may still have, including answers."""
        return self._left[0]

    @property
    def turns_left(self) -> int:
        """How many turns the row may still have."""
        return self._left[1]

    async def __call__(self, answer: object = None) -> Said:
        """Answer the latest turn, and return the next turn. The first call has no answer: it continues the prompt.

        Beyond the row's tokens or turns it returns a turn without tokens, whose end is "budget", once. Raises TypeError
        for an answer that is neither text nor messages, ValueError for a missing or an early answer, and RuntimeError
        for a second call beyond the budget, while another call waits, after a call that was cancelled while it waited,
        and after the play's end.
        """
        try:
            self._check(answer)
            plain = None if answer is None else self._shortened(as_answer(answer), may_end=self._turn >= 0)
        except (TypeError, ValueError, RuntimeError):
            await asyncio.sleep(0)  # else a play that tries again for ever would block its event loop
            raise
        if self._is_over or (plain is None and answer is not None):
            self._is_over = True
            return await self._beyond()
        self.pause()
        if self.late:
            raise asyncio.CancelledError
        self._waiting, self._has_asked = asyncio.get_running_loop().create_future(), True
        self._ask(Asks(self._play, self._turn + 1, plain))
        try:
            told = await self._waiting
        finally:
            self._waiting = None
            self.resume()
        self._left, self._has_asked = told.left, False
        if told.end == "budget" and not told.tokens:
            self._is_over = True
            return await self._beyond()
        self._turn += 1
        self._is_over = min(told.left) <= 0
        return Said(told.text, told.tokens, told.end, self._turn)

    async def _beyond(self) -> Said:
        """Return the turn beyond the budget. Raises RuntimeError the second time: the play may loop for ever."""
        await asyncio.sleep(0)  # as above
        if self.is_cut:
            tokens, turns = self._budget
            raise RuntimeError(
                f"say was called again beyond the row's budget, {tokens} tokens (play.max_tokens) and {turns} turns"
                ' (play.max_turns); return when said.end is "budget"'
            )
        self.is_cut = True
        return Said("", (), "budget", self._turn)

    def reward(self, value: float) -> None:
        """Add to the reward of the latest turn.

        Raises ValueError for a value beyond the bound of scores and before a turn, and RuntimeError after the play's
        end. The sums of a row's rewards have the same bound, which is checked when the play ends.
        """
        self._check_end("say.reward")
        number = float(value)
        if not abs(number) <= MOST_SCORE:
            raise ValueError(f"say.reward got {number:g}, expected {SCORES}")
        if self._turn < 0:
            raise ValueError("say.reward was called before the first turn")
        self.rewards[self._turn] = self.rewards.get(self._turn, 0.0) + number

    @property
    def turn(self) -> int:
        """The number of the latest turn; -1 before the first."""
        return self._turn

    @property
    def is_asking(self) -> bool:
        """Whether the play has asked for a turn that it has not received yet."""
        return self._has_asked

    def end(self) -> None:
        """End the row: tasks that the play left behind send nothing more, and waiting tasks get an error."""
        self.pause()
        self._has_ended = True
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(RuntimeError("the play ended while this call of say waited for the model"))

    def tell(self, told: Told) -> None:
        """Give the play the turn that it waits for."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(told)

    def resume(self) -> None:
        """Start the clock of the deadline."""
        if self._has_ended:
            return
        loop = asyncio.get_running_loop()
        self._since = loop.time()
        self._timer = loop.call_later(min(self._deadline_seconds, self._seconds_left), self._expire)

    def pause(self) -> None:
        """Stop the clock. A play that blocked its event loop may be late before the loop could stop it."""
        if self._timer is not None:
            self._timer.cancel()
            took = asyncio.get_running_loop().time() - self._since
            if took > min(self._deadline_seconds, self._seconds_left):
                self._note_lateness()
            self._seconds_left -= took
        self._timer = None

    def _note_lateness(self) -> None:
        if self._seconds_left < self._deadline_seconds:
            self.late = "its answers together took longer than play_seconds"
        else:
            self.late = f"no answer after {self._deadline_seconds:g} s"

    def _expire(self) -> None:
        self._note_lateness()
        self._stop()

    def _check_end(self, what: str) -> None:
        if self._has_ended:
            raise RuntimeError(f"{what} was called after the end of its play, perhaps by a task that the play left")

    def _check(self, answer: object) -> None:
        self._check_end("say")
        if self._waiting is not None:
            raise RuntimeError("say was called while another call of it waits for the model; await each in turn")
        if self._has_asked:
            raise RuntimeError("say was called after a call that was cancelled while it waited for the model")
        if answer is None:
            if self._turn >= 0:
                raise ValueError("say() continues the prompt, so only the first call is without an answer")
        elif self._turn < 0 and not (self._may_open and isinstance(answer, str)):
            raise ValueError("say was called with an answer before the first turn; write say() first")
