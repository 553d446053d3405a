"""Tries the imports of ranks in a separate process, so that a missing library shows before a model is built."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from prefect_rlhf.errors.errors import EngineFailed
from prefect_rlhf.errors.in_short import one_line
from prefect_rlhf.files.processes.environment import handed_over

LIMIT_SECONDS = 300.0
"""Without compiled files of Python, vLLM's modules alone take half a minute on an idle core."""
_FAILED = "failed: "


def try_imports(modules: Sequence[str], variables: Mapping[str, str], limit_seconds: float = LIMIT_SECONDS) -> None:
    """Import `modules` in a process with `variables`. Raises EngineFailed with the first error, or past the limit."""
    command = [sys.executable, "-P", "-m", "prefect_rlhf.engines.gang.processes.trial_imports", *modules]
    with handed_over(command, {**os.environ, **variables}) as (started, at_start, hidden):
        try:
            done = subprocess.run(
                started,
                env=at_start,
                pass_fds=(hidden,),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=limit_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise EngineFailed(f"the imports of a rank took more than {limit_seconds:g} s") from late
    sys.stderr.write(done.stderr)  # for the log of the command
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.startswith(_FAILED)]
        raise EngineFailed(lines[0].removeprefix(_FAILED) if lines else f"the imports ended with {done.returncode}")


def _main() -> None:
    """Import the modules of the command line; the first that fails ends this process with its error in a line."""
    for module in sys.argv[1:]:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001  a foreign module may raise anything while it is imported
            sys.stdout.write(f"\n{_FAILED}{module}: {one_line(f'{type(error).__name__}: {error}')}\n")
            sys.stdout.flush()
            os._exit(1)
    os._exit(0)  # without the destructors of foreign modules


if __name__ == "__main__":
    _main()
