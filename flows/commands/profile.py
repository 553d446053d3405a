"""The command `prefect-rlhf profile`: measure on this machine's devices, from a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from prefect_rlhf.blocks.cluster import Cluster
from prefect_rlhf.blocks.lease import lease
from prefect_rlhf.flows.profile import ask_profile, profile_on
from prefect_rlhf.placement.errors import InvalidInput
from prefect_rlhf.tasks.profiling.bench import Sizes
from prefect_rlhf.tasks.profiling.measure import Say


def parser() -> argparse.ArgumentParser:
    """The flags."""
    top = argparse.ArgumentParser(prog="prefect-rlhf profile", description=__doc__)
    top.add_argument("model", help="a Hugging Face folder, of which config.json is read, or a known shape")
    top.add_argument("--devices", type=int, default=1, help="devices of this machine, which all work at once")
    top.add_argument("--kind", choices=["cpu", "cuda"], default="cpu", help="what the devices are (default cpu)")
    top.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="compute format")
    top.add_argument("--rows", type=int, default=32, help="most rows of a micro-batch (default 32)")
    top.add_argument("--longest", type=int, default=128, help="most tokens of a row (default 128)")
    top.add_argument("--tensor-parallel", metavar="TP,...", help="degrees; without it, all that are possible")
    top.add_argument("--dry-run", action="store_true", help="say what would be measured and kept where")
    return top


def run(arguments: Sequence[str]) -> int:
    """Measure, keep, and say where; returns the exit status. Raises InvalidInput for the first mistake."""
    given = parser().parse_args(arguments)
    for flag, value, least in (("--rows", given.rows, 1), ("--longest", given.longest, 16)):
        if value < least:
            raise InvalidInput(flag, value, f"at least {least}")
    shape, degrees = Cluster(devices_per_node=given.devices).shape, _degrees(given.tensor_parallel)
    asked = ask_profile(given.model, given.dtype, given.kind, given.devices, Sizes(given.rows, given.longest), degrees)
    if given.dry_run:
        print(f"{asked.num_measurements} measurements of {given.model}, to be kept in {asked.file}")
        return 0
    with lease(shape, given.devices, kind=given.kind, say=lambda words: print(words, file=sys.stderr)) as held:
        print(profile_on(held, asked, progress()))
    return 0


def progress() -> Say:
    """On stderr, with the time so far."""
    began = time.monotonic()

    def say(number: int, total: int, words: str) -> None:
        print(f"{time.monotonic() - began:6.0f} s  {number}/{total}  {words}", file=sys.stderr, flush=True)

    return say


def _degrees(text: str | None) -> list[int] | None:
    try:
        return [int(part) for part in text.split(",")] if text else None
    except ValueError as error:
        raise InvalidInput("--tensor-parallel", text, "degrees, such as 1,2") from error
