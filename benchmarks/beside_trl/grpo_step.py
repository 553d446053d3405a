"""A GRPO step of ours and one of the newest TRL's, doing the same work on this machine; prints JSON as its last line.

    python -m benchmarks.beside_trl.grpo_step [--only ours|trl] [--rounds 1] [--steps 4] [--epochs 1] [--mini-batches 1]
        [--batch-size 4] [--samples 8] [--response-tokens 24] [--plan NAME] [--model FOLDER] [--prompts FILE]

Equal on both sides: the weights that they begin with, the prompts, the responses to each and their exact length (the
token that ends a response has no meaning), epochs and optimizer steps, bfloat16 products, AdamW, the loss (the clipped
ratio, a mean over rows), the reward (a Python function, `grpo_work.vowels`), no reference model, two cores. A step is
everything between two generations, its median over all but the first.

Not equal. Ours keeps main weights, gradients and moments in float32, TRL here all of them in bfloat16, which favours
it. Ours is two processes of one thread, with vLLM beside the trained weights, a Prefect server, fingerprints, and
rollouts written to disk; TRL's is one process of two threads that generates with transformers. TRL makes the old
log-probabilities anew where there is more than one optimizer step; ours divides by those of the generation. With
`--rounds` the sides take turns; each round prints a line, and the last line has the median of each side's rounds.
"""

from __future__ import annotations

import argparse
import json
from statistics import median

from benchmarks.beside_trl.grpo_work import GRPOWork
from benchmarks.beside_trl.step_sides import compared, measure_ours, measure_trl
from benchmarks.beside_trl.step_work import Measured, check_files

TRL_VERSION = "1.16.0"


def main() -> None:
    """Measure, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ours", "trl"])
    parser.add_argument("--rounds", type=int, default=1)
    for name in ("steps", "epochs", "mini_batches", "batch_size", "samples", "response_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(GRPOWork, name))
    for name in ("plan", "model", "prompts"):
        parser.add_argument(f"--{name}", default=getattr(GRPOWork, name))
    arguments = vars(parser.parse_args())
    only, rounds = arguments.pop("only"), arguments.pop("rounds")
    work = GRPOWork(**arguments)
    check_files(work)
    measured: dict[str, list[Measured]] = {}
    for _ in range(rounds):
        if only != "ours":
            measured.setdefault("trl", []).append(measure_trl("benchmarks.beside_trl.trl_grpo", work, TRL_VERSION))
        if only != "trl":
            measured.setdefault("ours", []).append(measure_ours("benchmarks.beside_trl.our_grpo", work))
        print(json.dumps(compared({side: parts[-1] for side, parts in measured.items()})), flush=True)
    print(json.dumps(compared({side: middle(parts) for side, parts in measured.items()})))


def middle(rounds: list[Measured]) -> Measured:
    """Return the median of each number over the rounds of one side."""
    first = rounds[0]
    return Measured(
        median(part.seconds_per_step for part in rounds),
        {call: median(part.seconds_per_call[call] for part in rounds) for call in first.seconds_per_call},
        {name: median(part.details[name] for part in rounds) for name in first.details},
    )


if __name__ == "__main__":
    main()
