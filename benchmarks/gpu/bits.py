"""Do two equal runs have equal bits, with torch's fastest kernels and with deterministic kernels?"""

from __future__ import annotations

import os

import torch

from benchmarks.gpu.models import SHAPES, full_rows, random_engine, train
from benchmarks.gpu.step import SEEN, Expected, Found, Machine, Step
from prefect_rlhf.engines.weights.fingerprint import digest


def equal_runs(machine: Machine) -> Found:
    """Three steps, twice each."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    shape, found = SHAPES["tiny"], machine.found
    sequences, columns = full_rows(8, 64, shape.vocab_size)
    with machine.gpu():
        for name, deterministic in (("fastest", False), ("deterministic", True)):
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            ends = []
            for _ in range(2):
                torch.manual_seed(0)
                engine = random_engine(machine.folder, shape)
                for _ in range(3):
                    train(engine, sequences, columns, 2)
                ends.append(digest(engine.weights()))
            found[f"{name}_equal"] = ends[0] == ends[1]
    torch.use_deterministic_algorithms(False)
    return found


SEEN_YES = Expected(1, 1, "yes, at this tiny shape", SEEN)
STEPS_OF_BITS = (
    Step("equal_runs", 5, 120, equal_runs, {"fastest_equal": SEEN_YES, "deterministic_equal": SEEN_YES}, findings="B4"),
)
