"""A run's terminal shows its own lines; all other output of its processes goes to a log file.

Libraries, ranks and Prefect's temporary server write to the descriptors of standard output and error, so these
descriptors are redirected.
"""

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TextIO, final

from prefect.logging import get_logger

from prefect_rlhf.files.atomic_file import writing
from prefect_rlhf.files.hub.progress import bars_on
from prefect_rlhf.files.path_text import from_here
from prefect_rlhf.flows.training.log import BEFORE_A_RUN
from prefect_rlhf.tasks.run_log import RUN_LOG

LOGS = "logs"  # a folder in `output_dir`
STANDARD = (1, 2)  # descriptors of output and error


@final
class Terminal(logging.Handler):
    """Shows lines on the original standard error; the first line is preceded by the path of the log.

    `log` gets these lines and all other output.
    """

    def __init__(self, stream: TextIO, log: Path) -> None:
        super().__init__()
        self.log, self.is_used, self._stream = log, False, stream

    def say(self, line: object) -> None:
        """Show a line on the terminal and write it to the log."""
        self._show(line)
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def emit(self, record: logging.LogRecord) -> None:
        """Show a line of the run's log. Prefect's own handler writes it to the log file."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._show(f"{level}{record.getMessage()}")

    def _show(self, line: object) -> None:
        lines = [line] if self.is_used else [f"full log: {from_here(str(self.log))}", line]
        self.is_used = True
        with suppress(OSError, ValueError, AttributeError):  # a closed terminal, or none, does not end the run
            self._stream.write("".join(f"{each}\n" for each in lines))
            self._stream.flush()


def new_log(output_dir: Path) -> Path:
    """Return the log file for a run that starts now, in `output_dir`, named by the time and this process's id."""
    return output_dir / LOGS / f"{datetime.now():%Y-%m-%d-%H%M%S}-{os.getpid()}.log"  # noqa: DTZ005  a person's own time


@contextmanager
def quiet_terminal(log: Path) -> Iterator[Terminal]:
    """Redirect standard output and error to `log` while the body runs, and when this process ends.

    If the body raises before it shows a line, the log is deleted, because a mistake ended the body before the run.
    Raises OutputFailed if the file cannot be written.
    """
    file = opened(log)
    try:
        with (
            descriptors_to(file) as before,
            copy_of(before[1]) as stream,
            showing(Terminal(stream, log)) as terminal,
        ):
            try:
                with bars_on(stream):
                    yield terminal
            except BaseException:
                if not terminal.is_used:
                    log.unlink()
                raise
    finally:
        atexit.register(_redirect, [file, file])  # libraries write again after the run


def opened(log: Path) -> int:
    """Return a descriptor of a new log."""
    with writing(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


@contextmanager
def descriptors_to(file: int) -> Iterator[list[int]]:
    """Redirect the standard descriptors to `file` while the body runs; yield copies of the originals."""
    before = [os.dup(descriptor) for descriptor in STANDARD]
    _redirect([file, file])
    try:
        yield before
    finally:
        _redirect(before)
        for descriptor in before:
            os.close(descriptor)


def _redirect(targets: list[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a closed stream cannot be flushed; None is no stream
            stream.flush()
    for descriptor, target in zip(STANDARD, targets, strict=True):
        os.dup2(target, descriptor)


@contextmanager
def copy_of(descriptor: int) -> Iterator[TextIO]:
    """Yield a stream that writes each line at once to a copy of a descriptor."""
    with os.fdopen(os.dup(descriptor), "w", 1, encoding="utf-8", errors="backslashreplace") as stream:
        yield stream


@contextmanager
def showing(terminal: Terminal) -> Iterator[Terminal]:
    """Show the lines of runs on a terminal."""
    loggers = [logging.getLogger(name) for name in (RUN_LOG, get_logger(BEFORE_A_RUN).name)]
    for logger in loggers:
        logger.addHandler(terminal)
    try:
        yield terminal
    finally:
        for logger in loggers:
            logger.removeHandler(terminal)
