"""Flows that know nothing of training: they only use the devices that the worker names."""

import asyncio
import fcntl
import os
import time
from contextlib import ExitStack
from pathlib import Path

from prefect import flow, task


@task
def work(seconds: float) -> None:
    """One task run."""
    time.sleep(seconds)


@flow
def plain(out: str, seconds: float = 0.3, tasks: int = 1, dry_run: bool = False) -> None:
    """Lock a file for each device while it works, as no two runs may; the kernel frees them if it is killed."""
    devices = os.environ["GPU_MESH_DEVICES"]
    with ExitStack() as held:
        for device in devices.split(","):
            file = held.enter_context(Path(out, f"device-{device}").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another run has it
        note(out, devices)
        for _ in range(tasks):
            work(seconds)


@flow
async def asynchronous(out: str, failures: int = 0) -> None:
    """Fail so many times."""
    await asyncio.sleep(0)
    fail(out, failures)


@flow
def generating(out: str, failures: int = 0):
    """Fail so many times, after something was yielded."""
    yield 1
    fail(out, failures)


def fail(out: str, failures: int) -> None:
    note(out, os.environ["GPU_MESH_DEVICES"])
    if len(noted(out)) <= failures:
        raise RuntimeError("it failed")


def note(out: str, devices: str) -> None:
    """Add the devices of an attempt to the list in the folder."""
    with Path(out, "attempts").open("a") as attempts:
        attempts.write(f"{devices}\n")


def noted(out: str) -> list[str]:
    """The devices of each attempt so far."""
    return Path(out, "attempts").read_text().splitlines()
