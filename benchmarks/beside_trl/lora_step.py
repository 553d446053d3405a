"""A GRPO step with a LoRA adapter: ours beside TRL with PEFT, and beside training all weights; JSON as its last line.

    python -m benchmarks.beside_trl.lora_step [--only ours|trl] [--rounds 1] [--rank 32] [--steps 4] [--batch-size 4]
        [--samples 8] [--response-tokens 24] [--model FOLDER] [--prompts FILE]

The two sides do the work of `grpo_step.py` and differ as it says, with a KL term whose reference is the frozen base.
`ratio` is TRL's step time over ours. The other numbers are of ours alone. `device_bytes_share` is what actor, reference
and vLLM hold on all devices with an adapter over what they hold when all weights are trained, both as the ranks report
it under the plan `flattening`, with a cache of keys and values of equal size. `certified_over_measured` is the bytes of
the certificate over those of the ranks, for both. `reallocation_bytes` are sent in each step under the plan `split`,
where one device trains and the other generates; they should equal `adapter_bytes` times that one receiver.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from statistics import median
from typing import Any

from benchmarks.beside_trl.grpo_step import TRL_VERSION, middle
from benchmarks.beside_trl.lora_work import LoraWork
from benchmarks.beside_trl.step_sides import compared, measure_ours, measure_trl
from benchmarks.beside_trl.step_work import Measured, check_files

OURS, THEIRS = "benchmarks.beside_trl.our_lora", "benchmarks.beside_trl.trl_lora"


def main() -> None:
    """Measure the sides in turn, then our bytes; print each round and the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ours", "trl"])
    parser.add_argument("--rounds", type=int, default=1)
    for name in ("rank", "steps", "batch_size", "samples", "response_tokens"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(LoraWork, name))
    for name in ("model", "prompts"):
        parser.add_argument(f"--{name}", default=getattr(LoraWork, name))
    arguments = vars(parser.parse_args())
    only, rounds = arguments.pop("only"), arguments.pop("rounds")
    if arguments["rank"] < 1:
        parser.error(f"--rank: got {arguments['rank']}, expected 1 or more")
    work = LoraWork(**arguments)
    check_files(work)
    measured: dict[str, list[Measured]] = {}
    for _ in range(rounds):
        if only != "ours":
            measured.setdefault("trl", []).append(measure_trl(THEIRS, work, TRL_VERSION))
        if only != "trl":
            measured.setdefault("ours", []).append(measure_ours(OURS, work))
        print(json.dumps(compared({side: parts[-1] for side, parts in measured.items()})), flush=True)
    line = compared({side: middle(parts) for side, parts in measured.items()})
    if only != "trl":
        line |= our_bytes(work, measured["ours"])
    print(json.dumps(line))


def our_bytes(work: LoraWork, with_adapter: list[Measured]) -> dict[str, Any]:
    """Run one step that trains all weights and one under `split`; return the bytes beside those of the rounds."""
    full = measure_ours(OURS, replace(work, rank=0, steps=1)).details
    apart = measure_ours(OURS, replace(work, plan="split", steps=1)).details
    adapter = {
        name: median(part.details[name] for part in with_adapter) for name in ("device_bytes", "certified_bytes")
    }
    return {
        "device_bytes_share": round(adapter["device_bytes"] / full["device_bytes"], 3),
        "certified_over_measured": [
            round(found["certified_bytes"] / found["device_bytes"], 4) for found in (adapter, full, apart)
        ],
        "reallocation_bytes": apart["reallocation_bytes"],
        "adapter_bytes": apart["adapter_bytes"],
    }


if __name__ == "__main__":
    main()
