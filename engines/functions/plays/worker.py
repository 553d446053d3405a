"""A worker process of plays: it imports the play function, then runs a coroutine for each row, until it is killed.

All plays of a worker share an event loop. It starts and ends as a worker of rewards does.
"""

import asyncio
import math
import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from prefect_rlhf.engines.functions.call import has_float
from prefect_rlhf.engines.functions.lifeline import connected
from prefect_rlhf.engines.functions.load import at, reason
from prefect_rlhf.engines.functions.message import Refused, line_of, received_from
from prefect_rlhf.engines.functions.plays.messages import (
    Begin,
    Close,
    Failed,
    Open,
    Over,
    Ready,
    Said,
    Told,
)
from prefect_rlhf.engines.functions.plays.say import Say
from prefect_rlhf.engines.functions.signatures.load import load_play
from prefect_rlhf.engines.functions.signatures.loaded import LoadedPlay, PlayFailed
from prefect_rlhf.engines.functions.signatures.play_function import WITH_OPENING
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.in_short import in_short, one_line


def main(channel: int, lifeline: int) -> None:
    """Serve a channel, a socket's descriptor, until its other end is closed."""
    try:
        asyncio.run(serve(connected(channel, lifeline)))
    except (EOFError, ConnectionError):  # asyncio's IncompleteReadError is an EOFError
        return


async def serve(connection: socket.socket) -> None:
    """Import the function, then open plays and pass on the model's turns. Raises EOFError after the last message.

    A refused function is reported; then no work is left.
    """
    reader, writer = await asyncio.open_connection(sock=connection)

    def send(said: Said) -> None:
        writer.write(line_of(said))

    begin: Begin = await received_from(reader)
    sys.path += [folder for folder in begin.path if folder not in sys.path]
    try:
        loaded = await load_play(begin.function)
    except InvalidInput as error:
        send(Refused(error.field, str(error.seen), error.expected))
        await writer.drain()
        return
    send(Ready(loaded.place, tuple(loaded.schemas)))
    plays: dict[int, Opened] = {}
    while True:
        message: Open | Told | Close = await received_from(reader)
        if isinstance(message, Open):
            plays[message.play] = Opened(message, loaded, begin, send, plays.pop)
        elif message.play not in plays:  # it ended before it could read this
            continue
        elif isinstance(message, Close):
            plays.pop(message.play).close()
        else:
            plays[message.play].say.tell(message)


class Opened:
    """A play in progress: its task, and the model as it sees it."""

    def __init__(
        self,
        message: Open,
        loaded: LoadedPlay,
        begin: Begin,
        send: Callable[[Said], None],
        forget: Callable[[int, None], object],
    ) -> None:
        """`forget` gets its number, and None, once it is over."""
        self._message, self._play, self._place, self._send = message, loaded.play, loaded.place, send
        self._forget = forget
        self._is_closed = False
        may_open = begin.function.signature in WITH_OPENING
        self.say = Say(message.play, message.left, begin, self._tell_pool, lambda: self.task.cancel(), may_open)
        self.task = asyncio.create_task(self._run())

    def close(self) -> None:
        """End the play; it sends no more messages."""
        self._is_closed = True
        self.task.cancel()
        self.say.end()

    def _tell_pool(self, said: Said) -> None:
        if not self._is_closed:
            self._send(said)

    async def _run(self) -> None:
        number, say = self._message.play, self.say
        try:
            say.resume()
            returned = await self._play(dict(self._message.row), say)
            say.pause()
            late = Failed(number, at(say.late, self._place))
            self._tell_pool(late if say.late else outcome(number, returned, say, self._place))
        except BaseException as error:  # noqa: BLE001  a person's code may raise anything, SystemExit too
            self._tell_pool(Failed(number, one_line(why_failed(error, say.late, self._place))))
        finally:
            say.end()
            self._forget(number, None)


def why_failed(error: BaseException, late: str, place: str) -> str:
    """Return why a play failed. `late` is the time limit that it exceeded, or None; a play past a limit is ended."""
    if late:  # the error's text is the place of a tool that was running
        return at(late, str(error) or place)
    return str(error) if isinstance(error, PlayFailed) else reason(error, place)


def outcome(number: int, returned: object, say: Say, place: str) -> Over | Failed:
    """Return the end of a play that returned None, a number, or a mapping with a `score` and other numbers."""
    if say.turn < 0:
        return Failed(number, at("it returned before its first say", place))
    if say.is_asking:
        return Failed(number, at("it returned while a call of say waited for the model; await each call", place))
    values: dict[Any, Any] = dict(returned) if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in values:
        return Failed(number, at(f"returned a mapping without score: {in_short(returned)}", place))
    for name, value in values.items():
        if name == "score" and value is None:
            continue
        if isinstance(value, str | bytes) or not has_float(value) or not isinstance(name, str):
            seen = f"{in_short(value)} of type {type(value).__name__}"
            return Failed(number, at(f"returned {seen} as {in_short(name)}, not a number", place))
        if not math.isfinite(float(value)):
            return Failed(number, at(f"returned {float(value)} as {in_short(name, str)}, not a finite number", place))
        values[name] = float(value)
    score = values.pop("score")
    try:
        return Over(number, score, say.rewards, values, say.is_cut)
    except ValueError as error:
        return Failed(number, at(str(error), place))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # without waiting for a person's threads and exit handlers
