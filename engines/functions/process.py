"""A worker from the pool's side: process, messages, printed output and end. Only `reap` waits for it.

The pool starts the worker's reaper: a process that ends in the same way as the worker and leaves no process below it.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Generic, TypeVar

from prefect_rlhf.engines.functions.message import packed
from prefect_rlhf.errors.in_short import in_short, one_line
from prefect_rlhf.files.modules import IN_RANK
from prefect_rlhf.files.processes.environment import handed_over

KEPT_OUTPUT = 4096
"""Bytes of a worker's latest output that are kept; the rest is read and dropped, so that printing never blocks."""
_REAP_SECONDS = 10.0
_HANG_UP_SECONDS = 2.0  # from the end of a process's channel to the end of the process
_AT_ONCE = 1 << 16
_MOST_AT_ONCE = 1 << 24  # bytes from a worker before the pool looks at the others
_LONGEST_LINE = 1 << 26
_OPTIONS = ("-u", "-X", "faulthandler")
_COMMAND = (sys.executable, "-P", *_OPTIONS, "-m")
_START = """
import sys
folder, module, *rest = sys.argv[1:]
if sys.version_info < (3, 11):
    sys.exit("it has to be Python 3.11 or newer, and is " + sys.version.split()[0])
from importlib.util import module_from_spec, spec_from_file_location
from runpy import run_module
sys.path.remove("")
name = module.partition(".")[0]
spec = spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
sys.modules[name] = module_from_spec(spec)
spec.loader.exec_module(sys.modules[name])
sys.argv = [module, *rest]
run_module(module, run_name="__main__", alter_sys=True)
"""
"""With it, another interpreter finds this package but no other package installed next to it."""
_PACKAGE = Path(__file__).parents[2]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # a worker uses a single CPU
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # and holds no device
    "PYTHONHASHSEED": "0",  # sets have the same order on every worker
    IN_RANK: "1",
}


Said = TypeVar("Said")


class WorkerProcess(Generic[Said]):
    """A fresh interpreter in its own session, which ends when this process does. Raises OSError.

    It runs `module` of this folder, and receives `first`. `read` parses a line of its messages, or raises ValueError.
    `environment` is added to every worker's variables; without it, the worker has this process's environment, which
    others cannot read in `/proc`. `python` is another interpreter than this process's; what it imports from this
    package needs only the standard library.
    """

    def __init__(
        self,
        first: object,
        read: Callable[[bytes], Said],
        module: str,
        environment: Mapping[str, str] | None = None,
        python: str = "",
    ) -> None:
        self._read = read
        self.channel, theirs = socket.socketpair()
        self.output, printed = os.pipe()
        lifeline, self._life = os.pipe()  # a pipe per worker: the kernel stores the group to kill with the read end
        start = (python, *_OPTIONS, "-c", _START, str(_PACKAGE)) if python else _COMMAND
        command = [*start, f"{__package__}.{module}", str(theirs.fileno()), str(lifeline)]
        given = {**(os.environ if environment is None else environment), **_ENVIRONMENT}
        passing = handed_over(command, given) if environment is None else nullcontext((command, given, None))
        try:
            with passing as (started, at_start, hidden):
                self._process = subprocess.Popen(
                    started,
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=(theirs.fileno(), lifeline, *(() if hidden is None else (hidden,))),
                    start_new_session=True,
                    env=at_start,
                )
        except BaseException:
            self._close()
            raise
        finally:
            theirs.close()
            os.close(printed)
            os.close(lifeline)
        self.channel.setblocking(False)
        os.set_blocking(self.output, False)
        self.hung_up = self.silent = False
        self.nonsense = ""  # a line that is not a message, or not at this time; reading stops there
        self._heard, self._tail, self._unsent = b"", b"", bytearray(packed(first))

    @property
    def unsent(self) -> bool:
        """Whether data remains to be sent when the channel accepts more."""
        return bool(self._unsent) and not self.hung_up

    def give(self, message: object) -> None:
        """Queue a message, and send as much as the channel accepts."""
        self._unsent += packed(message)
        self.send()

    def send(self) -> None:
        """Send as much of the unsent data as the channel accepts."""
        with suppress(BlockingIOError, ConnectionError):  # `ended` reports a worker that is gone
            while self._unsent:
                del self._unsent[: self.channel.send(memoryview(self._unsent)[:_AT_ONCE])]

    def hear(self) -> Iterator[Said]:
        """Yield the worker's new messages, up to a limit of bytes."""
        most = len(self._heard) + _MOST_AT_ONCE
        while not self.hung_up and not self.nonsense and len(self._heard) < most:
            try:
                data = self.channel.recv(_AT_ONCE)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            self.hung_up = not data
            self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            if self.nonsense:
                return
            try:
                said = self._read(line)
            except ValueError:
                self.nonsense = in_short(line.decode(errors="replace"))
            else:
                yield said
        if len(self._heard) > _LONGEST_LINE:
            self.nonsense = f"a line of more than {_LONGEST_LINE >> 20} MiB"

    def drain(self) -> None:
        """Read the worker's new output, up to a limit of bytes."""
        with suppress(BlockingIOError):
            data = os.read(self.output, _AT_ONCE)
            self.silent = not data
            self._tail = (self._tail + data)[-KEPT_OUTPUT:]

    def ended(self) -> str:
        """Return why the process has ended or must be ended; empty while it runs. This does not reap it."""
        if self.nonsense:
            return f"its process wrote a line that is not a message to the socket of its results: {self.nonsense}"
        patience = time.monotonic() + (_HANG_UP_SECONDS if self.hung_up else 0.0)
        try:
            while (end := self._end()) is None and time.monotonic() < patience:
                time.sleep(0.01)
        except ChildProcessError:
            return "its process is gone"
        if end is None:
            return "its process closed the socket of its results" if self.hung_up else ""
        if end.si_code == os.CLD_EXITED:
            return f"its process ended with status {end.si_status}"
        return f"its process died by {_signal(end.si_status)}"

    def printed(self) -> str:
        """Return the end of the worker's output."""
        return self._tail.decode(errors="replace").strip()

    def last_words(self) -> str:
        """Return the end of the worker's output as a suffix for a message; empty without output."""
        printed = self.printed()
        return f"; its last output: {in_short(one_line(printed))}" if printed else ""

    def kill(self) -> None:
        """Make the reaper kill the worker and every process that it started. Call `reap` afterwards."""
        with suppress(BrokenPipeError):  # it has ended
            os.write(self._life, b".")
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)  # a function may have stopped it

    def reap(self) -> None:
        """Wait for the killed process, close its channels, and log the end of its output."""
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            logging.getLogger(__name__).warning("process %d did not end after SIGKILL", self._process.pid)
            self._process.kill()
        self.drain()
        self._close()
        if self._tail:
            logging.getLogger(__name__).debug("last output of a host process:\n%s", self.printed())

    def _end(self) -> os.waitid_result | None:
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _close(self) -> None:
        self.channel.close()
        os.close(self.output)
        os.close(self._life)


def search_path() -> tuple[str, ...]:
    """Return this process's module search path and its working folder."""
    here = str(Path.cwd())
    return tuple(dict.fromkeys([*(folder or here for folder in sys.path), here]))


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
