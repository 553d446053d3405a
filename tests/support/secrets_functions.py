"""A reward with secrets and a play that looks for them. Each runs in a process of its own, which imports this file."""

import json
import os
from pathlib import Path

NAMES = ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "SECRET_TOKEN", "PREFECT_API_KEY", "WANDB_API_KEY")


async def looks_for_secrets(row, say):
    """Read as a tool does that opens whatever file the model names."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("environ", "cmdline"):
            try:
                if row["secret"].encode() in (process / name).read_bytes():
                    found[process.name] = f"{name} of {(process / 'cmdline').read_bytes()[:300]!r}"
            except OSError:  # it has ended, or belongs to another user
                continue
    Path(row["out"]).write_text(json.dumps(found))
    await say()


def has_secrets(row):
    """A reward may ask a service, with the key of its author."""
    return float(all(os.environ.get(name) == row["secret"] for name in NAMES))
