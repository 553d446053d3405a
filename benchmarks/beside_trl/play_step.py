"""A GRPO step whose rows are conversations with a tool, of ours and of the newest TRL's; prints JSON as its last line.

    python -m benchmarks.beside_trl.play_step [--only ours|trl] [--repeats 1] [--turns 4] [--batch-size 4]
        [--samples 8] [--response-tokens 8] [--plan NAME] [--model FOLDER]

`ratio_0ms`, `ratio_50ms` and `ratio_500ms` are TRL's seconds of a step over ours, with a tool that takes so long.

Equal on both sides: weights, chat template, prompts, turns of exactly `response_tokens` tokens, a call of the tool
after each turn but the last whatever the model says, the tool's answer, a single optimizer step, the loss, two threads.
TRL calls the tools of a row after those of the row before. What else differs is as in `grpo_step.py`, and favours TRL.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.beside_trl.grpo_step import TRL_VERSION
from benchmarks.beside_trl.play_work import PlayWork
from benchmarks.beside_trl.step_sides import measure_ours, measure_trl
from benchmarks.beside_trl.step_work import Measured
from benchmarks.demo.pretrained import prepare_model


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ours", "trl"])
    for name in ("repeats", "turns", "batch_size", "samples", "response_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(PlayWork, name))
    for name in ("plan", "model"):
        parser.add_argument(f"--{name}", default=getattr(PlayWork, name))
    arguments = vars(parser.parse_args())
    only = arguments.pop("only")
    work = PlayWork(**arguments)
    prepare_model("smollm2", Path(work.model), Path(".rlhf/downloads"))
    sides = {
        "trl": lambda: measure_trl("benchmarks.beside_trl.trl_play", work, TRL_VERSION),
        "ours": lambda: measure_ours("benchmarks.beside_trl.our_play", work),
    }
    measured: dict[str, Measured] = {}
    for name, measure in sides.items():
        if only in (None, name):
            measured[name] = measure()
            print(json.dumps(compared(measured)), flush=True)


def compared(measured: dict[str, Measured]) -> dict[str, Any]:
    """Return the ratios, and what they are made of."""
    line: dict[str, Any] = {
        name: {key: round(value, 3) for key, value in {**side.details, **side.seconds_per_call}.items()}
        for name, side in measured.items()
    }
    if {"trl", "ours"} <= measured.keys():
        trl, ours = measured["trl"].details, measured["ours"].details
        line |= {f"ratio_{name}": round(seconds / ours[name], 2) for name, seconds in trl.items()}
    return line


if __name__ == "__main__":
    main()
