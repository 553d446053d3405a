"""Copies to host memory beside computation: their bits, their speed, the stall of the device, and pinned bytes."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.models import SHAPES, full_rows, random_engine, train
from benchmarks.gpu.step import Expected, Found, Machine, Step
from prefect_rlhf.engines.weights.fingerprint import digest
from prefect_rlhf.engines.weights.pinned_memory import PinnedMemory


def copies_beside_training(machine: Machine) -> Found:
    """A second thread offloads and reloads a model while this thread trains another on a stream of its own."""
    shape = SHAPES[machine.pick("1.3B", "tiny")]
    rounds = machine.pick(50, 2)
    (machine.folder / "moved").mkdir(exist_ok=True)
    with machine.gpu() as pretend:
        moved = random_engine(machine.folder / "moved", shape, trained=False)
        trained = random_engine(machine.folder, shape)
        before = digest(moved.weights())
        sequences, columns = full_rows(4, machine.pick(1024, 16), shape.vocab_size)
        train(trained, sequences, columns, 1)
        if pretend is not None:  # its tensors are made by a single thread
            moved.offload()
            train(trained, sequences, columns, 1)
            moved.reload()
            return {"wrong_bits": int(digest(moved.weights()) != before)}
        alone = _train_seconds(trained, sequences, columns)
        wrong: list[int] = []
        rates: list[float] = []

        def move() -> None:
            torch.cuda.set_device(0)
            for _ in range(rounds):
                began = time.perf_counter()
                copied = moved.offload() + moved.reload()  # an offload copies nothing that the host still has
                rates.append(copied / (time.perf_counter() - began))
                wrong.append(digest(moved.weights()) != before)

        thread = threading.Thread(target=move)
        with torch.cuda.stream(torch.cuda.Stream()):
            thread.start()
            during = []
            while thread.is_alive():
                during.append(_train_seconds(trained, sequences, columns))
        thread.join()
    return {
        "wrong_bits": sum(wrong),
        "bytes_per_second": max(rates),
        "stall_ms": 1e3 * (sorted(during)[len(during) // 2] - alone),
    }


def pinned_bytes(machine: Machine) -> Found:
    """Host memory that a pinned buffer of torch takes beyond its size; the same for a registered anonymous map."""
    found = machine.found
    for gib in (5, 9, 17):
        before = _locked_bytes()
        kept = torch.empty(gib << 30, dtype=torch.uint8, pin_memory=True)
        found[f"torch_{gib}_gib"] = (_locked_bytes() - before) / kept.nbytes
        del kept
        torch._C._host_emptyCache()
    before = _locked_bytes()
    pinned = PinnedMemory(5 << 30)
    found["registered_5_gib"] = (_locked_bytes() - before) / len(pinned.content)
    pinned.close()
    return found


def _train_seconds(engine: Any, sequences: Any, columns: Any) -> float:
    began = time.perf_counter()
    train(engine, sequences, columns, 1)
    return time.perf_counter() - began


def _locked_bytes() -> int:
    """Return the process's memory in RAM, after the system has written all its pages."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


STEPS_OF_HOST_LINK = (
    Step(
        "copies_beside_training",
        5,
        180,
        copies_beside_training,
        {"wrong_bits": Expected(0, 0), "bytes_per_second": Expected(20e9, 60e9), "stall_ms": Expected(high=5)},
        findings="B3, N14",
    ),
    Step(
        "pinned_bytes",
        5,
        120,
        pinned_bytes,
        {
            **{f"torch_{gib}_gib": Expected(1.0, 2.0) for gib in (5, 9, 17)},
            "registered_5_gib": Expected(0.99, 1.01),
        },
        needs=frozenset({"hardware"}),
        findings="D5, N8",
    ),
)
