"""The end of a flow run's process: its exit status, and the reason that it gave."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

MISTAKE = 65  # of sysexits.h: data error. A person has to mend something; to try again is in vain
RESTART = 75  # temporary failure: the run did not end, it asks to be started again
STOPPED = 128 + signal.SIGTERM

REASON_VARIABLE = "RLHF_REASON_FILE"
LONGEST_REASON = 500  # characters; a state's message is one line in the UI


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A process that ended with exit `status` (-n for signal n), for `reason` if one is known.

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
    """Leave the reason why this process is about to end, one line, to the worker that started it, if one did."""
    if path := os.environ.get(REASON_VARIABLE):
        Path(path).write_text(" ".join(reason.split())[:LONGEST_REASON])


def read_reason(path: Path) -> str:
    """Return what `leave_reason` wrote; empty when the process left none."""
    return path.read_text() if path.is_file() else ""
