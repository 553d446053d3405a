"""The end of a flow run's process: its exit status, and the reason that the process wrote."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

MISTAKE = 65  # data error in sysexits.h: a person has to fix something, so a retry cannot help
RESTART = 75  # temporary failure in sysexits.h: the run has not ended and requests a restart
STOPPED = 128 + signal.SIGTERM

REASON_VARIABLE = "RLHF_REASON_FILE"
LONGEST_REASON = 500  # characters; a state's message is one line in the UI


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A process that ended with exit `status` (-n for signal n), for `reason` if known.

    >>> print(ProcessEnd(-9))
    its process was killed by SIGKILL
    >>> print(ProcessEnd(75, "RankLost: rank 1 was killed"))
    RankLost: rank 1 was killed
    """

    status: int
    reason: str = ""

    def __str__(self) -> str:
        if self.reason:
            return self.reason
        if self.status < 0:
            return f"its process was killed by {signal.Signals(-self.status).name}"
        return f"its process ended with status {self.status} before the run was over"


def leave_reason(reason: str) -> None:
    """Write why this process is about to end, as a line for the worker that started it; a no-op without a worker."""
    if path := os.environ.get(REASON_VARIABLE):
        Path(path).write_text(" ".join(reason.split())[:LONGEST_REASON])


def read_reason(path: Path) -> str:
    """Return the text that `leave_reason` wrote; empty if the process wrote no reason."""
    return path.read_text() if path.is_file() else ""
