"""Calls a user's function, sync or async, and returns a verdict on each row. Every failure is reported."""

import asyncio
import inspect
import math
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from prefect_rlhf.engines.functions.arguments import Row, arguments, fitting_signature
from prefect_rlhf.engines.functions.blame import blame_of, kept_names
from prefect_rlhf.engines.functions.load import LoadedFunction, at, reason
from prefect_rlhf.engines.functions.scores import MOST_NUMBER, MOST_SCORE, SCORES, Blame, Verdict, mean, wrong_names
from prefect_rlhf.errors.in_short import in_short, one_line

Verdicts = tuple[Verdict, ...]
ANSWERS = ("answer", "pred")  # keys of a function's result
LONGEST_ANSWER = 10_000  # characters
_FAIR = 0.1  # share of an async call's time that other calls may block
_BEAT_SECONDS = 0.02
_NOTICED_SECONDS = 0.01


class WrongName(ValueError):
    """A function gave `log_metric` a name that no line of metrics can hold, or too many names."""


class LoopDelay:
    """How many seconds calls have blocked an event loop."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> NoReturn:
        """Count until cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            before = now()
            await asyncio.sleep(_BEAT_SECONDS)
            late_by = now() - before - _BEAT_SECONDS
            self.seconds += late_by if late_by > _NOTICED_SECONDS else 0.0


def call(function: LoadedFunction, rows: Sequence[Row], runner: asyncio.Runner) -> Verdicts:
    """Call a function that is not declared async; if it still returns an awaitable, `runner` awaits it."""
    logged: dict[str, list[float]] = {}
    given: list[object] = [*rows]
    try:
        with kept_names():
            returned = _called(function, rows, logged, given)
            if inspect.isawaitable(returned):
                returned = runner.run(_awaited(returned))
        return _judged(function, rows, returned, logged)
    except BaseException as error:  # noqa: BLE001  a user's function may raise anything, SystemExit too
        return _all_failed(rows, _why(error, function), blame=_blame(error, given))


async def call_async(function: LoadedFunction, rows: Sequence[Row], seconds: float, delay: LoopDelay) -> Verdicts:
    """Call an async function with a limit of `seconds`; `delay` measures how long other calls blocked the loop."""
    logged: dict[str, list[float]] = {}
    given: list[object] = [*rows]
    limit, before = asyncio.timeout(seconds), delay.seconds
    try:
        with kept_names():
            async with limit:
                returned = await _called(function, rows, logged, given)
        return _judged(function, rows, returned, logged)
    except BaseException as error:  # noqa: BLE001  as above
        if not limit.expired():
            return _all_failed(rows, _why(error, function), blame=_blame(error, given))
        overdue = asyncio.get_running_loop().time() - (limit.when() or 0.0)
        held_up = delay.seconds - before + overdue > _FAIR * seconds
        return _all_failed(rows, late(seconds, function.place), held_up)


def _blame(error: BaseException, given: Sequence[object]) -> Blame:
    return "result" if isinstance(error, WrongName) else blame_of(error, given)


def late(seconds: float, place: str) -> str:
    """Return the error of a call that missed its deadline.

    >>> late(0.5, "mine.py:3 in f")
    'no value after 0.5 s (mine.py:3 in f)'
    """
    return at(f"no value after {seconds:g} s", place)


def _called(function: LoadedFunction, rows: Sequence[Row], logged: dict[str, list[float]], given: list[object]) -> Any:
    """Call the function; its numbers are added to `logged`, its arguments to `given`."""

    def log_metric(name: str, value: float) -> None:
        if abs(number := _float(value)) <= MOST_NUMBER:
            logged.setdefault(str(name), []).append(number)
        if wrong := wrong_names(logged):
            raise WrongName(f"log_metric got {wrong}")

    args, kwargs = arguments(function.call, function.of.signature, rows, log_metric)
    given += [*args, kwargs]
    _seed(f"{function.of.name}\n{rows[0]['prompt']!r}\n{rows[0]['response']}")
    return function.call(*args, **kwargs)


def _seed(text: str) -> None:
    random.seed(text)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(random.Random(text).getrandbits(32))


async def _awaited(returned: Any) -> Any:
    return await returned


def _judged(
    function: LoadedFunction, rows: Sequence[Row], returned: Any, logged: Mapping[str, list[float]]
) -> Verdicts:
    """Return a verdict per row on a call's result; values of TRL's `log_metric` count for the first row."""
    signature, place = function.of.signature, function.place
    if signature in ("row", "verl") and isinstance(returned, Mapping):
        if "score" not in returned:
            why = at(f"returned a dict without score: {in_short(returned)}", place)
            return _all_failed(rows, why, blame="result")
        numbers = _numbers(returned)
        if wrong := wrong_names(numbers):
            return _all_failed(rows, at(f"returned {wrong}", place), blame="result")
        verdict = _verdict(returned["score"], place, none=signature == "row", metrics=numbers)
        return (replace(verdict, answer=_answer(returned)),)
    if signature != "trl":
        verdict = _verdict(returned, place, none=signature == "row")
        return (replace(verdict, failed=_with_signature(verdict.failed, function)) if verdict.failed else verdict,)
    if isinstance(returned, str | bytes | Mapping) or not hasattr(returned, "__len__"):
        why = at(f"returned {_seen(returned)}, not a list of {len(rows)} numbers", place)
        return _all_failed(rows, why, blame="result")
    values = list(returned)
    if len(values) != len(rows):
        return _all_failed(rows, at(f"returned {len(values)} values for {len(rows)} rows", place), blame="result")
    told = {name: mean(numbers) for name, numbers in logged.items()}
    return tuple(
        _verdict(value, place, none=True, metrics={} if number else _numbers(told))
        for number, value in enumerate(values)
    )


def _verdict(value: Any, place: str, *, none: bool, metrics: Mapping[str, float] | None = None) -> Verdict:
    """Return the verdict on a value: a number within the bound of scores, or None if `none` allows it."""
    if value is None and none:
        return Verdict(metrics=metrics or {})
    if isinstance(value, str | bytes) or not has_float(value):
        return Verdict(failed=at(f"returned {_seen(value)}, not a number", place), blame="result")
    number = _float(value)
    if not math.isfinite(number):
        return Verdict(failed=at(f"returned {number}, not a finite number", place))
    if abs(number) > MOST_SCORE:
        return Verdict(failed=at(f"returned {number:g}, not {SCORES}", place))
    return Verdict(number, metrics=metrics or {})


def has_float(value: Any) -> bool:
    """Whether `float` accepts values of this type, including numbers of NumPy and torch."""
    return hasattr(type(value), "__float__") or hasattr(type(value), "__index__")


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numbers of a mapping except its score, and except numbers whose sum may overflow."""
    numbers = {
        name: _float(value)
        for name, value in values.items()
        if isinstance(name, str) and name != "score" and has_float(value) and not isinstance(value, str | bytes)
    }
    return {name: value for name, value in numbers.items() if abs(value) <= MOST_NUMBER}


def _answer(returned: Mapping[Any, Any]) -> str | None:
    """Return the answer that a function found, as text: `answer`, or verl's `pred`; None if it names no answer."""
    found = next((returned[key] for key in ANSWERS if returned.get(key) is not None), None)
    return None if found is None else str(found)[:LONGEST_ANSWER].encode(errors="replace").decode()


def _float(value: Any) -> float:
    """Return a number as a float; infinity for an integer that no float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _why(error: BaseException, function: LoadedFunction) -> str:
    return _with_signature(reason(error, function.place), function)


def _with_signature(why: str, function: LoadedFunction) -> str:
    """Return the reason of a failure; of a function that takes a row as completions, with the signature to set."""
    fitting = fitting_signature(function.call) if function.of.signature == "row" else None
    return f"{why}; set signature: {fitting}" if fitting else why


def _seen(value: Any) -> str:
    return f"{in_short(value)} of type {type(value).__name__}" if value is not None else "None"


def _all_failed(rows: Sequence[Row], why: str, held_up: bool = False, blame: Blame = "response") -> Verdicts:
    return tuple(Verdict(failed=one_line(why), held_up=held_up, blame=blame) for _ in rows)
