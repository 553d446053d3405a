"""A plugin of pytest: a line of JSON for each test as it ends, so that a session that is cut leaves names and reasons.

pytest -p tests.outcomes        # with RLHF_OUTCOMES=FILE
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

VARIABLE = "RLHF_OUTCOMES"


def pytest_configure(config):
    """Begin the file, in the process that workers report to."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (name := os.environ.get(VARIABLE)):
        config.pluginmanager.register(Outcomes(Path(name)))


class Outcomes:
    """Writes and flushes the outcome of each test; failures go to the terminal too."""

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lines = file.open("w")

    def pytest_runtest_logreport(self, report) -> None:
        if not report.failed and report.when != "call" and not report.skipped:
            return  # a setup or a teardown that went well
        said = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            said["reason"] = (crash.message if crash else str(report.longrepr))[:500]
            said["place"] = f"{crash.path}:{crash.lineno}" if crash else ""
        said["ended"] = datetime.now(UTC).isoformat(timespec="seconds")
        self._lines.write(json.dumps(said) + "\n")
        self._lines.flush()
        if report.failed:
            first = said["reason"].partition("\n")[0]
            sys.stderr.write(f"\nFAILED {report.nodeid}: {first}\n")
