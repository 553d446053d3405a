"""The background processes of the demo (server, worker): started once, found again later, ended on request."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Daemon:
    """A background process, identified by a file in `folder` with its process id."""

    name: str
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def _pid_file(self) -> Path:
        return self.folder / f"{self.name}.pid"

    def pid(self) -> int | None:
        """Read its process id; None if it is not running (another program may have its number now)."""
        if not self._pid_file.exists():
            return None
        pid, _, started = self._pid_file.read_text().partition(" ")
        return int(pid) if started and _start_ticks(int(pid)) == started else None

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it in its own session, unless it is running."""
        if self.pid() is not None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._pid_file.write_text(f"{process.pid} {_start_ticks(process.pid)}")

    def stop(self, limit_seconds: float = 20.0) -> bool:
        """Send its whole session SIGTERM, then SIGKILL after the limit. Returns whether it was running."""
        pid = self.pid()
        if pid is None:
            return False
        os.killpg(pid, signal.SIGTERM)
        deadline = time.monotonic() + limit_seconds
        while self.pid() is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        if self.pid() is not None:
            os.killpg(pid, signal.SIGKILL)
        self._pid_file.unlink(missing_ok=True)
        return True


def _start_ticks(pid: int) -> str | None:
    """Return the kernel's start time of `pid`, which differs for a reused number; None if it ended or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]
