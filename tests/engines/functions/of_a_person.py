"""Functions as a person writes them, and as they go wrong."""

import asyncio
import contextlib
import ctypes
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

WAITING = []
A_NUMBER = 3


class Judge:
    def __call__(self, row):
        return len(row["response"])

    def method(self, row):
        return -len(row["response"])


judge = Judge()


def length(row):
    return len(row["response"])


def number(row):
    return row["number"]


def drawn(row):
    return random.random()


def right_if_asked(row):
    return None if row["ground_truth"] is None else row["ground_truth"] == row["response"]


def with_torch(row):
    return "torch" in sys.modules


def pid(row):
    return os.getpid()


def two(row, other):
    return 0.0


def behave(row):
    """Do what the response says."""
    return BEHAVIOURS[row["response"]](row)


def _raise(row):
    raise ValueError("no digits\nin it")


def _hang(row):
    while True:
        pass


def _hang_in_c(row):
    return re.match(r"(a+)+$", "a" * 60 + "b")


def _sleep(row):
    time.sleep(1000)


def _stop(row):
    os.kill(os.getpid(), signal.SIGSTOP)


def _kill(row):
    os.kill(os.getpid(), signal.SIGKILL)


def _crash(row):
    ctypes.string_at(0)


def prints(row):
    """Print four megabytes."""
    for _ in range(20_000):
        sys.stdout.write("x" * 100 + "\n")
        sys.stderr.write("y" * 100 + "\n")
    return 1


def _print_and_die(row):
    sys.stdout.write("no memory left\nat all\n")
    sys.stdout.flush()
    os.abort()


class _Unwritable(Exception):
    def __str__(self):
        raise RuntimeError("not this either")


def _unwritable(row):
    raise _Unwritable


BEHAVIOURS = {
    "good": lambda row: 1.0,
    "raise": _raise,
    "unwritable": _unwritable,
    "hang": _hang,
    "hang in C": _hang_in_c,
    "sleep": _sleep,
    "stop": _stop,
    "SIGKILL": _kill,
    "crash": _crash,
    "sys.exit": lambda row: sys.exit(3),
    "os._exit": lambda row: os._exit(4),
    "interrupt": lambda row: signal.raise_signal(signal.SIGINT),
    "NaN": lambda row: float("nan"),
    "inf": lambda row: float("inf"),
    "beyond the bound": lambda row: -1e39,
    "beyond floats": lambda row: 10**400,
    "at the bound": lambda row: 1e9,
    "text": lambda row: "1.0",
    "list": lambda row: [1.0],
    "no pickle": lambda row: lambda: 1.0,
    "print and die": _print_and_die,
}


def fails_once(row):
    """Fail until the file is there; it is there the second time."""
    file = Path(row["file"])
    if not file.exists():
        file.write_text("")
        if row["response"] == "kill":
            _kill(row)
        raise OSError("not yet")
    return 1.0


def stays_with_a_child(row):
    """Start a process, write both numbers, and never return."""
    child = subprocess.Popen(["sleep", "1000"])
    whole = Path(row["file"])
    part = whole.with_suffix(".part")
    part.write_text(f"{os.getpid()} {child.pid}")
    part.rename(whole)
    return _hang_in_c(row)


def starts_a_daemon(row):
    """Start a process in a session of its own, whose parent ends; write its number, and do what the response says."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            whole = Path(row["file"])
            part = whole.with_suffix(".part")
            part.write_text(str(os.getpid()))
            part.rename(whole)
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    while not Path(row["file"]).exists():
        time.sleep(0.01)
    return BEHAVIOURS[row["response"]](row)


def _sockets():
    """The open sockets of this process: that of its results."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()).startswith("socket:"):
                found.append(int(descriptor.name))
    return found


NONSENSE = {
    "text": b"hello\n",
    "half a line": b"[1, ",
    "deep": b"Begun " + b"[" * 100_000 + b"\n",
    "no fields": b"Begun\n",
    "fields in a list": b"Begun [0]\n",
    "no kind": b"Hello {}\n",
    "a field too few": b"Begun {}\n",
    "a field too many": b'Begun {"call": 0, "row": 0}\n',
    "a number of another type": b'Begun {"call": false}\n',
    "a call that nobody made": b'Done {"call": 1000000, "verdicts": []}\n',
    "verdicts of no row": b'Done {"call": 0, "verdicts": []}\n',
    "a value that is text": b'Done {"call": 0, "verdicts": '
    b'[{"value": "1", "failed": "", "held_up": false, "metrics": {}, "blame": "response"}]}\n',
    "a value that is not finite": b'Done {"call": 0, "verdicts": '
    b'[{"value": NaN, "failed": "", "held_up": false, "metrics": {}, "blame": "response"}]}\n',
    "a refusal": b'Refused {"field": "reward", "seen": "a", "expected": "b"}\n',
    "bytes": bytes(range(256)) + b"\n",
}


def writes_nonsense(row):
    """Write to the socket of its process's results."""
    for descriptor in _sockets() if row["response"] in NONSENSE else ():
        os.write(descriptor, NONSENSE[row["response"]])
    return 1.0


def writes_without_end(row):
    for descriptor in _sockets():
        while row["response"] == "bad":
            os.write(descriptor, bytes(1 << 16))
    return 1.0


def replaces_json(row):
    if row["response"] == "bad":
        json.dumps = lambda value: "nonsense"
    return 1.0


async def waits(row):
    """Do what the response says."""
    if row["response"] == "wait":
        await asyncio.sleep(1000)
    if row["response"] == "block":
        time.sleep(1000)
    if row["response"] == "block a little":
        time.sleep(0.9)
    if row["response"] == "raise":
        raise ValueError("no reply")
    if row["response"] == "sys.exit":
        sys.exit(3)
    await asyncio.sleep(0.01)
    return 1.0


async def together(row):
    """Return once four of them wait."""
    WAITING.append(row)
    while len(WAITING) < 4:
        await asyncio.sleep(0.01)
    return float(len(row["response"]))
