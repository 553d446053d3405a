"""A PPO step of ours and one of TRL's, doing the same work on this machine; prints JSON as its last line.

    python -m benchmarks.ppo_step [--only ours|trl] [--steps 4] [--model FOLDER] [--prompts FILE]

Each side runs in a process of its own, one after the other, and prints `ppo_work.Measured` as its last line:
`benchmarks.our_ppo` and `benchmarks.trl_ppo`. TRL is installed beside the environment (.venv-trl), not into it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.ppo_work import Measured, PPOWork, check_files

TRL_FOLDER = Path(".venv-trl")
TRL_PACKAGES = (  # 1.12 is the last TRL with PPOTrainer; transformers, torch and accelerate are the environment's own
    "trl==1.12.0",
    "datasets==5.2.0",
    "multiprocess==0.70.19",
    "xxhash==4.1.0",
    "pandas==3.1.1",
)
LIMIT_SECONDS = 3600


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ours", "trl"])
    parser.add_argument("--steps", type=int, default=PPOWork.steps)
    parser.add_argument("--model", default=PPOWork.model)
    parser.add_argument("--prompts", default=PPOWork.prompts)
    arguments = parser.parse_args()
    work = PPOWork(model=arguments.model, prompts=arguments.prompts, steps=arguments.steps)
    check_files(work)
    sides = [arguments.only] if arguments.only else ["trl", "ours"]
    print(json.dumps(summary({side: measure(side, work) for side in sides})))


def measure(side: str, work: PPOWork) -> Measured:
    """Run one side; its output passes through, its last line is what it measured."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if side == "trl":
        install_trl()
        environment |= {"PYTHONPATH": f"{TRL_FOLDER}:.", "OMP_NUM_THREADS": str(work.threads)}
    module = {"ours": "benchmarks.our_ppo", "trl": "benchmarks.trl_ppo"}[side]
    command = [sys.executable, "-m", module, json.dumps(asdict(work))]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False
    )
    if done.returncode:
        sys.exit(f"{module}: exit {done.returncode}")
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


def install_trl() -> None:
    """Put TRL and what it needs beside the environment, unless they are there."""
    if (TRL_FOLDER / "trl-1.12.0.dist-info").is_dir():
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(TRL_FOLDER)]
    subprocess.run([*command, *TRL_PACKAGES], check=True, timeout=LIMIT_SECONDS)


def summary(measured: dict[str, Measured]) -> dict[str, Any]:
    """The last line: `ratio` is TRL's seconds over ours."""
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


if __name__ == "__main__":
    main()
