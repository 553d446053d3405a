"""A flow run's process, under a keeper that ends it together with the worker."""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from prefect_rlhf.blocks.worker import keeper
from prefect_rlhf.files.processes.environment import handed_over, starts_module

KEEPER_SECONDS = 2 * keeper.REAP_SECONDS  # a keeper that has not ended this long after the grace is killed


@dataclass(slots=True)
class FlowProcess:
    """A running keeper and its child, the flow run's process. No process of the run is left after `stop` or the end."""

    flow_run_id: str
    grace_seconds: float
    _keeper: asyncio.subprocess.Process

    @classmethod
    async def start(
        cls,
        flow_run_id: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        working_dir: str,
        grace_seconds: float,
        devices: Sequence[int] = (),
        lock: int | None = None,
        folder: str = "",
        stream_output: bool = True,
    ) -> Self:
        """Start `command`. The command and its keeper inherit the descriptors, so they hold devices and lock without
        the worker.

        `folder` is a temporary folder; the keeper removes it if the worker is dead. Other processes of this user cannot
        read the variables of `python -m MODULE` and of its keeper in `/proc`. Another command starts with all of them.
        """
        output = None if stream_output else asyncio.subprocess.DEVNULL
        locks = (*devices, lock) if lock is not None else tuple(devices)
        held = "" if lock is None else str(lock)
        passing = handed_over if starts_module(command) else _shown_to_all
        with passing(command, environment) as (started, variables, descriptor):
            hidden = () if descriptor is None else (descriptor,)
            numbers = held, ",".join(map(str, devices)), folder, "".join(map(str, hidden))
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",  # the flow's folder and variables must not affect the keeper
                str(Path(keeper.__file__).resolve()),
                *(flow_run_id, str(grace_seconds), *numbers, *started),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=variables,
                cwd=working_dir,
                pass_fds=(*locks, *hidden),
                start_new_session=True,  # Ctrl-C at the worker's terminal reaches the worker alone
            )
        return cls(flow_run_id, grace_seconds, process)

    @property
    def identifier(self) -> str:
        """`host:pid` of the keeper: SIGTERM to it stops the run cleanly."""
        return f"{socket.gethostname()}:{self._keeper.pid}"

    @property
    def has_ended(self) -> bool:
        return self._keeper.returncode is not None

    async def ended(self, timeout_seconds: float | None = None) -> bool:
        """Wait at most `timeout_seconds` for the end of the run's processes; return whether they have ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._keeper.wait(), timeout_seconds)
        return self.has_ended

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after the grace. Returns at most seconds later, once no process is left."""
        if self._keeper.stdin is not None:
            self._keeper.stdin.write(keeper.STOP)
            self._keeper.stdin.close()
        if not await self.ended(self.grace_seconds + KEEPER_SECONDS):
            self._keeper.kill()
            await self._keeper.wait()
        keeper.reap(self.flow_run_id)

    @property
    def status(self) -> int:
        """Exit status of the flow run's process; -n for signal n."""
        status = self._keeper.returncode
        assert status is not None  # read after the end
        return 128 - status if status > 128 else status


@contextlib.contextmanager
def _shown_to_all(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple[Sequence[str], dict[str, str], None]]:
    yield command, dict(environment), None


def signal_keeper(identifier: str, flow_run_id: str, signal_number: int) -> None:
    """Send a signal to the keeper of a flow run, which `identifier` names.

    Raises LookupError if the keeper is on another host or has ended. Its pid may belong to another process by then,
    even to another run's keeper.
    """
    host, _, pid = identifier.rpartition(":")
    if host != socket.gethostname():
        raise LookupError(f"{identifier} is on another host than {socket.gethostname()}")
    command = Path(f"/proc/{pid}/cmdline")
    words = command.read_bytes() if command.exists() else b""
    if not all(word.encode() in words for word in (Path(keeper.__file__).name, flow_run_id)):
        raise LookupError(f"{identifier} is gone")
    os.kill(int(pid), signal_number)
