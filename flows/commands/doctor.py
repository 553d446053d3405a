"""The command `prefect-rlhf doctor`: a check of this host, a line for each fact."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prefect_rlhf.flows.commands.flags import ALL_AT_ONCE, ChosenKind, whole_number
from prefect_rlhf.flows.commands.prefect_settings import check_prefect_settings
from prefect_rlhf.placement.devices.mesh import MOST_DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags:
    """The flags of `doctor`."""

    kind: ChosenKind = None
    devices: Annotated[
        int | None,
        whole_number(1, MOST_DEVICES),
        Parameter(help="Number of devices to check; default: all GPUs, or two cores.", show_default=False),
    ] = None


def doctor(flags: Annotated[DoctorFlags, ALL_AT_ONCE] = DoctorFlags()) -> int:
    """Check this host within about a minute, and print a line for each fact.

    It checks versions, driver, GPUs, compiler, shared and locked memory. Then all
    devices compute a sum together, and each engine runs a small model. The exit
    status is 1 if a run would fail.

      prefect-rlhf doctor --kind cuda
    """
    check_prefect_settings()
    # Imported here: --help needs no Prefect.
    from prefect_rlhf.flows.algorithm.terminal import quiet_terminal
    from prefect_rlhf.flows.hardware.checkup import findings

    # A name that nobody could guess: other users may make links in the temporary folder.
    descriptor, name = tempfile.mkstemp(".log", "prefect-rlhf-doctor-")
    os.close(descriptor)
    log = Path(name)
    faults = 0
    with os.fdopen(os.dup(1), "w") as terminal, quiet_terminal(log):  # libraries warn of much that is no fault
        for finding in findings(flags.kind, flags.devices):
            print(finding, file=terminal, flush=True)
            faults += finding.is_fault
    if faults:
        print(f"log: {log}")
    else:
        log.unlink()
    return 1 if faults else 0
