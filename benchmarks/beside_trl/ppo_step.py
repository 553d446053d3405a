"""A PPO step of ours and one of TRL's, doing the same work on this machine; prints JSON as its last line.

    python -m benchmarks.beside_trl.ppo_step [--only ours|trl] [--steps 4] [--model FOLDER] [--prompts FILE]

Each side runs in a process of its own, one after the other, and prints `step_work.Measured` as its last line:
`our_ppo.py` and `trl_ppo.py` of this folder. TRL is installed beside the environment (.venv-trl), not into it.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.beside_trl.ppo_work import PPOWork
from benchmarks.beside_trl.step_sides import compared, measure_ours, measure_trl
from benchmarks.beside_trl.step_work import check_files

TRL_VERSION = "1.12.0"  # the last TRL with PPOTrainer


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
    measured = {}
    if arguments.only != "ours":
        measured["trl"] = measure_trl("benchmarks.beside_trl.trl_ppo", work, TRL_VERSION)
    if arguments.only != "trl":
        measured["ours"] = measure_ours("benchmarks.beside_trl.our_ppo", work)
    print(json.dumps(compared(measured)))


if __name__ == "__main__":
    main()
