"""What two sides that are compared have in common: a model, prompts, steps, threads; and what each of them measures."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Steps of an algorithm on one model and one set of prompts; bfloat16 compute; `threads` in all."""

    model: str = ".rlhf/models/smollm2"
    prompts: str = ".rlhf/data/prompts.parquet"
    response_tokens: int = 24
    steps: int = 4  # measured, after one that is not
    threads: int = 2
    plan: str  # of ours


@dataclass(frozen=True)
class Measured:
    """Median seconds of a step, and of each of its calls; `details` are numbers of one side alone."""

    seconds_per_step: float
    seconds_per_call: Mapping[str, float]
    details: Mapping[str, float] = field(default_factory=dict)


def check_files(work: StepWork) -> None:
    """Exit with one line unless the model and the prompts are there."""
    for path in (work.model, work.prompts):
        if not Path(path).exists():
            sys.exit(f"{path} does not exist; `make demo` writes it, or name another with --model and --prompts")
