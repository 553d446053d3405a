"""Everything that only a GPU can answer about this project, asked in order; prints JSON as its last line.

    python -m benchmarks.first_gpu_morning --one [--command 1]   # a single GPU, nine commands of 10 minutes
    python -m benchmarks.first_gpu_morning                       # a machine with several GPUs
    python -m benchmarks.first_gpu_morning --one --pretend       # no GPU: the steps that the pretend GPU can run

Each step runs in a process of its own with a limit, and the next step runs whatever becomes of it. Each finding is
printed when it is known, and written to `findings.jsonl` in the step's folder with the date, the card and the driver,
so a step that is cut leaves what it found. A line of JSON per step goes to `steps.jsonl` in the folder of --out, with a
log and the files of each step beside it. The report compares each finding with a range, and says whether the range was
seen on a card or comes from reading. It ends with a replacement for each constant of placement/memory and of the cost
model that a step measures. Timings need the GPU and its cores alone.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from pathlib import Path

from benchmarks.gpu.all_steps import ALL_GPUS, ONE_GPU, preload
from benchmarks.gpu.findings import card
from benchmarks.gpu.report import report, summary
from benchmarks.gpu.run import run_step
from benchmarks.gpu.step import Machine

COMMANDS = range(1, 10)


def main() -> None:
    """Run the steps, print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", action="store_true", help="a single GPU")
    parser.add_argument("--command", type=int, choices=COMMANDS, help="with --one: only this one of its nine commands")
    parser.add_argument("--pretend", action="store_true", help="on the pretend GPU, with small shapes")
    parser.add_argument("--step", action="append", help="only the step of this name; may be repeated")
    parser.add_argument("--out", type=Path, default=Path("build/first_gpu_morning"), help="the folder of all files")
    given = parser.parse_args()
    if given.command and not given.one:
        sys.exit("--command: got a number without --one, expected both: commands are parts of --one")
    steps = [step for step in (ONE_GPU if given.one else ALL_GPUS) if given.command in (None, step.command)]
    names = [step.name for step in steps]
    if unknown := [name for name in given.step or () if name not in names]:
        sys.exit(f"--step: got {unknown[0]}, expected one of {', '.join(names)}")
    steps = [step for step in steps if not given.step or step.name in given.step]
    named = {"card": "pretend GPU"} if given.pretend else card()
    machine = Machine(given.out.resolve(), given.pretend, _num_gpus(given.pretend), card=named)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the step's processes end with this one
    machine.folder.mkdir(parents=True, exist_ok=True)
    if given.pretend:
        preload()
    outcomes = []
    with (machine.folder / "steps.jsonl").open("w") as lines:
        for step in steps:
            outcomes.append(run_step(step, machine))
            print(outcomes[-1].line(), file=lines, flush=True)
            print(outcomes[-1].line(), flush=True)
    for line in report(steps, outcomes, given.pretend):
        print(line)
    print(json.dumps(summary(steps, outcomes, given.pretend)))


def _num_gpus(pretend: bool) -> int:
    """Count the GPUs without making a CUDA context in this process."""
    if pretend:
        return 1
    import torch

    if not (count := torch.cuda.device_count()):
        sys.exit("no GPU: torch sees no CUDA device; --pretend runs the steps that need no hardware")
    return count


if __name__ == "__main__":
    main()
