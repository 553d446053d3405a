"""Our side of a comparison: a flow on a leased mesh of `threads` CPU ranks, with a Prefect server."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.beside_trl.step_work import Measured, StepWork
from benchmarks.demo.outcome import read_metrics
from prefect_rlhf.flows.commands import cli
from prefect_rlhf.placement.augmented.node import BEHIND
from prefect_rlhf.tasks.running.journal import read_spans

Work = TypeVar("Work", bound=StepWork)


def measured(work: StepWork, run_dir: Path) -> Measured:
    """Medians over the steps after the first, by the controller's clock; of a call with the transfers that feed it."""
    steps = [step for step in read_metrics(run_dir) if step["step"] > 1]
    seconds_per_call: dict[str, float] = {}
    for span in read_spans(run_dir):
        if span.step > 1 and span.kind not in BEHIND:
            call = span.call or span.kind
            seconds_per_call[call] = seconds_per_call.get(call, 0.0) + (span.end - span.start) / work.steps
    return Measured(
        seconds_per_step=median(step["seconds"] for step in steps),
        seconds_per_call=dict(sorted(seconds_per_call.items())),
        details={
            share: round(median(step[share] for step in steps), 4)
            for share in ("orchestration_share", "fingerprint_share")
        },
    )


def train(
    algorithm: str,
    work: Work,
    parameters_in: Callable[[Path], dict[str, Any]],
    measure: Callable[[Work, Path], Measured] = measured,
) -> None:
    """Run the flow, with its parameters for a folder of its own, on one rank per thread; print what a step took."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = Path(folder) / "parameters.json"
        parameters.write_text(json.dumps(parameters_in(Path(folder))))
        status = cli.main([algorithm, "--parameters", str(parameters), "--devices", str(work.threads)])
        if status:
            sys.exit(status)
        print(json.dumps(asdict(measure(work, Path(folder) / "latest"))))
