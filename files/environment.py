"""Environment variables that other processes of this user cannot read in `/proc/PID/environ`.

That file shows the variables that a process was started with, and every process of the same user can read it. So a
play's tool could read the credentials of each process above it. Our processes are therefore started with only the
variables of `is_shown`, and read the others from a descriptor before they import anything:

    python environment.py DESCRIPTOR [LIFELINE] -m MODULE ARGUMENTS...

LIFELINE is the end of a pipe: the process ends as soon as no other process holds the pipe's other end.

A process that somebody else started, such as a run at a terminal, wipes these variables out of that memory (`hide`).
This file also runs as a script, so it imports only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import runpy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

HARMLESS = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Variables that every process may see; a play gets no others."""
_READ_AT_START = ("PREFECT__FLOW_RUN_ID", "CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES")
"""Variables that a process must start with: the mark of its run, and what the loader and libraries read."""
_FAMILIES = re.compile("(LC|LD|MALLOC|OMP|GOMP|KMP|MKL|OPENBLAS)_[A-Z0-9_]+|PYTHON[A-Z]+")
_OF_A_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL")  # such as LD_SDK_KEY, which is not of the loader
_STAT = Path("/proc/self/stat")
_START_OF_ENVIRONMENT = 47  # of /proc/self/stat after the name: fields 50 and 51 of proc(5)


def is_shown(name: str) -> bool:
    """Whether a process may be started with this variable, so that others can read it.

    >>> [name for name in ("HOME", "PYTHONPATH", "HF_TOKEN", "HTTPS_PROXY", "LD_SDK_KEY") if is_shown(name)]
    ['HOME', 'PYTHONPATH']
    """
    is_of_family = _FAMILIES.fullmatch(name) is not None and _OF_A_SECRET.search(name) is None
    return name in HARMLESS or name in _READ_AT_START or is_of_family


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process may be started with."""
    return {name: value for name, value in environment.items() if is_shown(name)}


def starts_module(command: Sequence[str]) -> bool:
    """Whether a command is this interpreter's `python ... -m MODULE ...`, which can read its variables itself.

    >>> starts_module([sys.executable, "-P", "-m", "mine"]), starts_module([sys.executable, "mine.py", "-m", "x"])
    (True, False)
    """
    if command[0] != sys.executable or "-m" not in command[1:-1]:
        return False
    flags = command[1 : command.index("-m")]
    with_word = [place for place, flag in enumerate(flags) if flag in ("-X", "-W")]
    return all(flag.startswith("-") and flag != "-c" or place - 1 in with_word for place, flag in enumerate(flags))


@contextmanager
def handed_over(
    command: Sequence[str], environment: Mapping[str, str], lifeline: int | None = None
) -> Iterator[tuple[list[str], dict[str, str], int]]:
    """Yield the command, the environment and the descriptor to start `python ... -m MODULE` with.

    The process inherits the descriptor, and then has all of `environment` before it imports MODULE. The descriptor is
    closed here after the body. If it inherits a `lifeline` too, it ends with the pipe.
    """
    flags = command.index("-m")
    with written(environment) as descriptor:
        script = str(Path(__file__).resolve()), str(descriptor), *([] if lifeline is None else [str(lifeline)])
        yield [*command[:flags], *script, *command[flags:]], shown(environment), descriptor


@contextmanager
def written(environment: Mapping[str, str]) -> Iterator[int]:
    """Yield an in-memory descriptor with the variables, for a process that inherits it; it is closed after the body."""
    descriptor = os.memfd_create("environment")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(dict(environment)).encode())
        yield descriptor
    finally:
        os.close(descriptor)


def take(descriptor: int) -> None:
    """Add the variables from a descriptor that `written` yielded, and close it."""
    os.environ.update(json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0)))
    os.close(descriptor)


def hide() -> None:
    """Wipe all but the shown variables out of `/proc/self/environ`; `os.environ` and C's `getenv` keep them.

    A thread that reads the environment in C at this moment may see an empty value, so call it early.
    """
    if not _STAT.exists():  # not Linux
        return
    for name, value in list(os.environ.items()):
        with suppress(OSError, ValueError):  # a name that setenv refuses, such as an empty name
            os.environ[name] = value  # setenv(3) copies it to memory of its own
    for address, length in _hidden_entries():
        ctypes.memset(address, 0, length)


def _hidden_entries() -> Iterable[tuple[int, int]]:
    """Return address and length of each variable in the memory of `/proc/self/environ` that is not shown."""
    fields = _STAT.read_text().rpartition(")")[2].split()
    begin, end = map(int, fields[_START_OF_ENVIRONMENT : _START_OF_ENVIRONMENT + 2])
    for entry in ctypes.string_at(begin, end - begin).split(b"\0"):
        name, is_variable, _ = entry.partition(b"=")
        if is_variable and not is_shown(os.fsdecode(name)):
            yield begin, len(entry)
        begin += len(entry) + 1


def _end_with(lifeline: int) -> None:
    """End this process, however its starter ended, once the other end of a pipe is closed."""
    os.read(lifeline, 1)  # nobody writes
    os._exit(1)


def _main() -> None:
    """Take the variables from the descriptor, then run the module as `python -m` does."""
    flag = sys.argv.index("-m")
    descriptor, *lifelines = map(int, sys.argv[1:flag])
    module, *arguments = sys.argv[flag + 1 :]
    take(descriptor)
    for lifeline in lifelines:
        os.set_inheritable(lifeline, False)
        Thread(target=_end_with, args=(lifeline,), name="lifeline", daemon=True).start()
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()  # noqa: PTH109  the folder of this script is there
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
