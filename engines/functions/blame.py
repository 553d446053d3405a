"""Decides whether a function's error is due to the response, or to a mistake in code or rows that no response can
cure.
"""

import ast
import inspect
import linecache
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Lock
from types import CodeType, FrameType, ModuleType
from typing import Any

from prefect_rlhf.engines.functions.scores import Blame

_OF_A_CALL = re.compile(r"\(\) (takes|missing|got) ")
_MOST_VALUES = 10_000  # of the given rows that are looked at
_HERE = str(Path(__file__).parent)
_NAMES = "_names_where_it_was_raised"  # an attribute of an error
_MONITORING: Any = getattr(sys, "monitoring", None)  # of Python 3.12 and later
_TOOL = 4  # a number that no kind of tool has by convention


class _Users:
    """The calls that keep names at the moment. Calls of a process may overlap, also in threads."""

    lock = Lock()
    number = 0


@contextmanager
def kept_names() -> Iterator[None]:
    """Keep the local names at the raise of a KeyError, for `blame_of` of errors in the body.

    Since Python 3.12, a comprehension is a part of its function, and its names are gone once an error has left it.
    Without them, a key that all rows lack would be blamed on the response.
    """
    _use(1)
    try:
        yield
    finally:
        _use(-1)


def _use(more: int) -> None:
    """Count a user more or less. The first turns the interpreter's report of errors on, the last turns it off."""
    if _MONITORING is None:
        return
    with _Users.lock:
        was, _Users.number = _Users.number, _Users.number + more
        if not was and _MONITORING.get_tool(_TOOL) is None:  # otherwise another tool has the number: no names are kept
            _MONITORING.use_tool_id(_TOOL, __name__)
            _MONITORING.register_callback(_TOOL, _MONITORING.events.RAISE, _keep_names)
            _MONITORING.set_events(_TOOL, _MONITORING.events.RAISE)
        elif not _Users.number and _MONITORING.get_tool(_TOOL) == __name__:
            _MONITORING.set_events(_TOOL, 0)
            _MONITORING.register_callback(_TOOL, _MONITORING.events.RAISE, None)
            _MONITORING.free_tool_id(_TOOL)


def _keep_names(code: CodeType, _: int, error: BaseException) -> None:
    """Note the names of the innermost frame: an error comes to the frames of its callers later."""
    frame = sys._getframe(1)
    if type(error) is KeyError and not hasattr(error, _NAMES) and frame.f_code is code:
        setattr(error, _NAMES, dict(frame.f_locals))


def blame_of(error: BaseException, given: Iterable[object]) -> Blame:
    """Return the cause of an error: the response, the code or the row; `given` are the rows and arguments of the call.

    A response may be code that a function runs, a key that it looks up, or text that it parses into a dict. So a
    missing name, attribute or key, or a wrong call, is blamed on the code only if it is written in a file. The object
    that lacks the key must also be given; the object that lacks the attribute must be given, or be a module.
    """
    try:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, ImportError):
            return "response" if frames[-1].f_code.co_filename.startswith("<") else "code"
        written, kind = _written(error), type(error)
        if isinstance(written, ast.Subscript) and kind is KeyError:
            return "row" if _lacks_key(error, written, frames[-1], given) else "response"
        is_due = (
            (kind is NameError and isinstance(written, ast.Name) and _is_unknown(written.id, error, frames[-1].f_code))
            or (kind is AttributeError and isinstance(written, ast.Attribute) and _lacks_attribute(error, given))
            or (kind is TypeError and isinstance(written, ast.Call) and _is_called_wrongly(error, written, frames[-1]))
        )
        return "code" if is_due else "response"
    except Exception:  # noqa: BLE001  a person's objects may raise anything when they are looked at
        return "response"


def _written(error: BaseException) -> ast.expr | None:
    """Return the expression that raised, as it stands in its file; None if there is no such file."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    lines = [line.encode() for line in linecache.getlines(at.filename)]
    if at.lineno is None or at.end_lineno is None or not lines:
        return None
    part = lines[at.lineno - 1 : at.end_lineno]
    part[-1] = part[-1][: at.end_colno]  # columns count bytes
    part[0] = part[0][at.colno :]
    return ast.parse(b"(" + b"".join(part) + b")", mode="eval").body


def _is_unknown(name: str, error: Any, code: CodeType) -> bool:
    """Whether a name is bound nowhere; an outer function may bind it in some branches only."""
    return name == error.name and name not in code.co_freevars


def _lacks_attribute(error: Any, given: Iterable[object]) -> bool:
    return isinstance(error.obj, ModuleType) or _is_given(error.obj, given)


def _is_called_wrongly(error: BaseException, call: ast.Call, frame: FrameType) -> bool:
    """Whether a function that is named in the code was called with other arguments than it takes."""
    if not _OF_A_CALL.search(str(error)):
        return False
    code, called = frame.f_code, call.func
    if code.co_filename.startswith(_HERE):  # the call of the function itself
        return True
    unpacked = [each.value for each in call.args if isinstance(each, ast.Starred)]
    unpacked += [each.value for each in call.keywords if each.arg is None]
    passed_on = _passed_on(code)
    is_chosen = isinstance(called, ast.Name) and called.id in code.co_varnames
    is_named = isinstance(called, ast.Name | ast.Attribute) and not is_chosen
    return is_named and all(isinstance(each, ast.Name) and each.id in passed_on for each in unpacked)


def _passed_on(code: CodeType) -> tuple[str, ...]:
    """Return the names of `*args` and `**kwargs` of a function."""
    named = code.co_argcount + code.co_kwonlyargcount
    number = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[named : named + number]


def _lacks_key(error: BaseException, written: ast.Subscript, frame: FrameType, given: Iterable[object]) -> bool:
    """Whether a key that is written in the code is missing in a dict that was given."""
    key, local = written.slice, getattr(error, _NAMES, frame.f_locals)
    is_global = isinstance(key, ast.Name) and key.id not in local
    if not is_global and not isinstance(key, ast.Constant):
        return False
    names = {**frame.f_globals, **local}
    return error.args == (_value(key, names),) and _is_given(_value(written.value, names), given)


def _value(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """Return the value of a name, of a constant, or of an item of such. Raises LookupError for others."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name):
        return names[expression.id]
    if isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        whole = _value(expression.value, names)
        if isinstance(whole, dict | list | tuple):
            item: Any = expression.slice.value
            return whole[item]
    raise LookupError(ast.dump(expression))


def _is_given(value: object, given: Iterable[object]) -> bool:
    """Whether a value was given, or is a dict of some given columns, as a function takes them by `**columns`."""
    if value is None:  # of a column without a value, or of a search in the response
        return False
    for one in islice(_within(given), _MOST_VALUES):
        if one is value:
            return True
        if isinstance(one, dict) and isinstance(value, dict) and value and _is_part(value, one):
            return True
    return False


def _is_part(some: dict[Any, Any], whole: dict[Any, Any]) -> bool:
    return all(key in whole and whole[key] is item for key, item in some.items())


def _within(values: Iterable[object]) -> Iterator[object]:
    """Yield the values of rows: themselves, and those in dicts and lists, the outermost first."""
    level: list[object] = list(values)
    while level:
        yield from level
        dicts, lists = (
            (one.values() for one in level if isinstance(one, dict)),
            (one for one in level if isinstance(one, list | tuple)),
        )
        level = list(islice((item for part in (*dicts, *lists) for item in part), _MOST_VALUES))
