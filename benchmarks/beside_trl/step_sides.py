"""Two sides of one work, ours and TRL's, each in a process of its own, one after the other; their comparison as JSON.

TRL is installed beside the environment (a folder of `.venv-trl` for each version), not into it; torch, transformers
and accelerate are the environment's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.beside_trl.step_work import Measured, StepWork

TRL_FOLDER = Path(".venv-trl")
TRL_NEEDS = ("datasets==5.2.0", "multiprocess==0.70.19", "xxhash==4.1.0", "pandas==3.1.1")
LIMIT_SECONDS = 3600


def measure_ours(module: str, work: StepWork) -> Measured:
    """Run our side."""
    return _run(module, work, {})


def measure_trl(module: str, work: StepWork, version: str) -> Measured:
    """Run TRL's side, with this version of TRL, which is installed unless it is there."""
    folder = trl_folder(version)
    if not (folder / f"trl-{version}.dist-info").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, f"trl=={version}", *TRL_NEEDS], check=True, timeout=LIMIT_SECONDS)
    return _run(module, work, {"PYTHONPATH": python_path(version), "OMP_NUM_THREADS": str(work.threads)})


def trl_folder(version: str) -> Path:
    """Return where this version of TRL is, or will be."""
    return TRL_FOLDER / f"trl-{version}"


def python_path(version: str) -> str:
    """Return a PYTHONPATH with TRL, this folder's benchmarks and what it was before."""
    before = os.environ.get("PYTHONPATH")
    return os.pathsep.join([str(trl_folder(version)), ".", *([before] if before else [])])


def compared(measured: dict[str, Measured]) -> dict[str, Any]:
    """Return the last line of a comparison: `ratio` is TRL's seconds over ours."""
    line: dict[str, Any] = {f"{side}_seconds": round(m.seconds_per_step, 2) for side, m in measured.items()}
    line |= {
        f"{side}_seconds_per_call": {call: round(seconds, 2) for call, seconds in m.seconds_per_call.items()}
        for side, m in measured.items()
    }
    if {"ours", "trl"} <= measured.keys():
        line["ratio"] = round(measured["trl"].seconds_per_step / measured["ours"].seconds_per_step, 2)
    if "ours" in measured:
        line |= measured["ours"].details  # orchestration_share, fingerprint_share
    return line


def _run(module: str, work: StepWork, variables: dict[str, str]) -> Measured:
    """Run one side; its output passes through, its last line is what it measured."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"} | variables
    command = [sys.executable, "-m", module, json.dumps(asdict(work))]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False
    )
    if done.returncode:
        sys.exit(f"{module}: exit {done.returncode}")
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))
