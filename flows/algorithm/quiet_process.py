"""Runs quietly inside a user's process, such as a script or a notebook, and afterwards restores everything.

A notebook's streams don't write to the standard descriptors, so they are replaced too, and so are libraries' log
handlers.
"""

import atexit
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from prefect_rlhf.flows.algorithm.terminal import STANDARD, Terminal, copy_of, descriptors_to, opened, showing

OF_LIBRARIES = (
    *("prefect_rlhf", "prefect", "docket", "httpx", "httpcore"),
    *("vllm", "megatron", "transformers", "torch", "triton", "ray"),
)
"""Packages that write to the log file; handlers of other loggers are yours, and keep their targets."""


class _Quiet:
    """The redirection of this process, and the number of runs that need it."""

    def __init__(self) -> None:
        self.lock, self.users, self.stack = threading.Lock(), 0, ExitStack()
        self.terminal: Terminal | None = None


_quiet = _Quiet()


@contextmanager
def quiet_process(log: Path) -> Iterator[Terminal]:
    """While the body runs, send libraries' output to `log`.

    Your own log handlers keep their targets, and afterwards everything is restored. If several runs overlap, their
    lines go to the same terminal, and all other output to the first run's log. A log is deleted if no run wrote a line.
    Raises OutputFailed if the file cannot be written.
    """
    with _quiet.lock:
        if _quiet.terminal is None:
            _quiet.terminal = _quiet.stack.enter_context(_aside(log))
        terminal, _quiet.users = _quiet.terminal, _quiet.users + 1
    try:
        yield terminal
    finally:
        with _quiet.lock:
            _quiet.users -= 1
            if not _quiet.users:
                _quiet.terminal = None
                _quiet.stack.close()


@contextmanager
def _aside(log: Path) -> Iterator[Terminal]:
    """Redirect descriptors, streams and handlers of libraries; a person's own handlers stay where they are."""
    file = opened(log)
    try:
        with ExitStack() as held:
            held.enter_context(_hooks_kept())
            originals: dict[int, TextIO] = {}
            with suppress(OSError):  # a daemon may have no standard descriptors
                before = held.enter_context(descriptors_to(file))
                originals = {
                    number: held.enter_context(copy_of(each)) for number, each in zip(STANDARD, before, strict=True)
                }
            writer = held.enter_context(copy_of(file))
            held.enter_context(_own_handlers_to(originals, writer))
            shown: TextIO = originals.get(_descriptor_of(sys.stderr) or 0, sys.stderr)
            held.enter_context(_streams_to(writer))
            terminal = held.enter_context(showing(Terminal(shown, log)))
            try:
                yield terminal
            finally:
                if not terminal.is_used:
                    log.unlink(missing_ok=True)
    finally:
        os.close(file)


class _Aside(io.TextIOBase):
    """A stream in place of one that has no standard descriptor, such as a notebook's: it writes to the log.

    A library that was imported meanwhile may keep it, so that afterwards it writes to the original stream.
    """

    def __init__(self, original: TextIO | None, log: TextIO) -> None:
        super().__init__()
        self._original, self._target = original, cast(TextIO | None, log)

    def write(self, text: str) -> int:
        """Write to the log, or afterwards to the original stream, if there is one."""
        return len(text) if self._target is None else self._target.write(text)

    def flush(self) -> None:
        """Flush where it writes."""
        if self._target is not None:
            self._target.flush()

    def writable(self) -> bool:
        """Whether it takes text: yes."""
        return True

    def end(self) -> None:
        """Write to the original stream from now on."""
        self._target = self._original


@contextmanager
def _streams_to(log: TextIO) -> Iterator[None]:
    """Replace streams without a standard descriptor, and let handlers of libraries that write to them use the log."""
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    replaced = {name: stream for name, stream in streams.items() if _descriptor_of(stream) not in STANDARD}
    aside = {name: _Aside(stream, log) for name, stream in replaced.items()}
    for name, stream in aside.items():
        setattr(sys, name, stream)
    originals = {id(stream): aside[name] for name, stream in replaced.items()}
    moved = [
        (handler, handler.stream)
        for logger_name, handler in _stream_handlers()
        if _is_of_library(logger_name, handler) and id(handler.stream) in originals
    ]
    for handler, stream in moved:
        _move(handler, originals[id(stream)])
    try:
        yield
    finally:
        for handler, stream in moved:
            _move(handler, stream)
        for name, stream in aside.items():
            stream.end()
            if getattr(sys, name) is stream:
                setattr(sys, name, replaced[name])


@contextmanager
def _own_handlers_to(originals: Mapping[int, TextIO], log: TextIO) -> Iterator[None]:
    """Let a person's own handlers of a terminal or of a notebook's cell write there, as before.

    Lines of libraries go to the log instead: they would be among those of the run.
    """
    shown = (sys.stdout, sys.stderr)
    own = [
        handler
        for name, handler in _stream_handlers()
        if not _is_of_library(name, handler) and (handler.stream in shown or _descriptor_of(handler.stream) in STANDARD)
    ]
    filters = [(handler, _NotOfLibraries(handler, log)) for handler in own]
    moved = [
        (handler, handler.stream, stream)
        for handler in own
        if (stream := originals.get(_descriptor_of(handler.stream) or 0)) is not None
    ]
    for handler, _, stream in moved:
        _move(handler, stream)
    for handler, each in filters:
        handler.addFilter(each)
    try:
        yield
    finally:
        for handler, each in filters:
            handler.removeFilter(each)
        for handler, original, stream in moved:
            if handler.stream is stream:
                _move(handler, original)


class _NotOfLibraries(logging.Filter):
    """Lets a handler show no line of a library; the log has it."""

    def __init__(self, handler: logging.Handler, log: TextIO) -> None:
        super().__init__()
        self._handler, self._log = handler, log

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the handler shows a record; the log gets a record that it does not show."""
        if record.name.partition(".")[0] not in OF_LIBRARIES:
            return True
        with suppress(OSError, ValueError):
            self._log.write(f"{self._handler.format(record)}\n")
        return False


@contextmanager
def _hooks_kept() -> Iterator[None]:
    """Give the root logger its handlers and level back, and the interpreter its hook for uncaught errors.

    Libraries configure the root logger, and torch writes `[rank0]:` before each line of a later error. A handler of
    another kind that was added meanwhile is a person's own.
    """
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        added = [handler for handler in root.handlers if handler not in handlers]
        root.handlers[:] = [*handlers, *(handler for handler in added if not _is_configured(handler))]
        root.setLevel(level)
        sys.excepthook = hook
        atexit.register(logging.getLogger("prefect").setLevel, logging.WARNING)  # it says that its server stops


def _is_configured(handler: logging.Handler) -> bool:
    """Whether a handler is of a library, or a stream handler as libraries add them to the root logger."""
    return _is_of_library("", handler) or type(handler).__module__ == logging.__name__ and _writes_to_stream(handler)


def _writes_to_stream(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)


def _stream_handlers() -> Iterator[tuple[str, Any]]:
    """Yield each handler that writes to a stream, with the name of its logger."""
    root = logging.getLogger()
    loggers = [root, *(each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger))]
    for logger in loggers:
        for handler in logger.handlers:
            if _writes_to_stream(handler) and "stream" in vars(handler):  # else it writes to the present sys.stderr
                yield logger.name, handler


def _is_of_library(logger_name: str, handler: logging.Handler) -> bool:
    """Whether a library made a handler: it is on the library's logger, or the library defines its class."""
    places = (logger_name, type(handler).__module__)
    return any(place.partition(".")[0] in OF_LIBRARIES for place in places)


def _move(handler: Any, stream: Any) -> None:
    """Let a handler write to another stream; Prefect's has a console of rich, which has the stream too."""
    handler.setStream(stream)
    if (console := getattr(handler, "console", None)) is not None:
        console.file = stream


def _descriptor_of(stream: Any) -> int | None:
    try:
        return int(stream.fileno())
    except (OSError, ValueError, AttributeError):  # a stream of a notebook or of a test; a closed one; none
        return None
