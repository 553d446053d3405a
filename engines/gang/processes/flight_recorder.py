"""The file with a rank's latest collectives, from torch's flight recorder: it shows which ranks wait for which.

Gloo and NCCL record their collectives. A rank writes the file if a call passes its deadline. NCCL's watchdog would
write the same file, but its limit is beyond every deadline.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch._C import _distributed_c10d

PREFIX = "flight_recorder_"
"""How the files' names begin; a rank's number follows, as torch's own command reads them."""


def environment(folder: Path) -> Mapping[str, str]:
    """Return variables that let NCCL's watchdog write its record to `folder`; variables that you set are kept.

    Torch warns of a deprecated name in each process, so a number of collectives under the old name gets the new name.
    """
    wanted = {
        "TORCH_FR_BUFFER_SIZE": os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"),  # collectives of each rank
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / PREFIX),
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def write_record(folder: Path, rank: int, *, of_nccl: bool) -> None:
    """Write the collectives of this process. The file is a pickle of plain values."""
    dump = _distributed_c10d._dump_nccl_trace if of_nccl else _distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    (folder / f"{PREFIX}{rank}").write_bytes(dump())
