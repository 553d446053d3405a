"""GRPO with all weights on one GPU, ours and TRL's at the same work, and the kernels of our calls; JSON lines.

    python -m benchmarks.one_gpu [--size 0.5b|1.5b|3b|7b] [--half ours|trl|profile|decoding ...] [--steps 4] [--out ..]
    python -m benchmarks.one_gpu --size 7b --adapter-rank 32        # ours alone, with an adapter on a frozen base
    python -m benchmarks.one_gpu --pretend        # here: a tiny shape on the processor, all halves

The work: Qwen2.5's shape with random weights, 32 prompts of 128 tokens, 8 responses of 512 tokens to each, bfloat16,
an optimizer step of AdamW. `ours` starts `prefect-rlhf run grpo` as a user would, under the plan with the fewest
micro-batches that fit. `trl` is TRL with vLLM in its own process, from the folder TRL_FOLDER if that is set. `profile`
times the kernels of a train_step and of an inference, `decoding` kernels and Python of a decoded token. Each half can
run alone. Every finding is printed and appended to `record-SIZE.jsonl` of --out at once, so a cut loses no finding. The
last line compares the halves of that record: `ratio` is TRL's seconds over ours, if both ran on the same card.

Not equal: ours keeps float32 main weights, gradients and moments, TRL all of them in bfloat16, which favours it. TRL
has no fingerprints, no rollouts on disk, no server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.one_card.card import device_facts, others_on_card, versions
from benchmarks.one_card.child import NO_MEMORY, relayed
from benchmarks.one_card.record import Record, findings
from benchmarks.one_card.work import SIZES, TRL_ROWS, Work

HALVES = ("ours", "profile", "decoding", "trl")
MAKE_SECONDS = 120.0


def main() -> None:
    """Run the halves, print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[size for size in SIZES if size != "tiny"], default="1.5b")
    parser.add_argument("--half", choices=HALVES, action="append", help="only this one; may be repeated")
    parser.add_argument("--steps", type=int, default=Work.steps, help="the first of them is not counted")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds of a half")
    parser.add_argument("--trl-rows", type=int, help="rows that TRL trains on at once; default: by size")
    parser.add_argument("--trl-share", type=float, default=Work.trl_share, help="of the memory, for TRL's vLLM")
    parser.add_argument("--adapter-rank", type=int, default=0, help="train an adapter of this rank; ours alone")
    parser.add_argument("--out", type=Path, default=Path("build/one_gpu"), help="the folder of all results")
    parser.add_argument("--models", type=Path, help="the folder of models; default: --out")
    parser.add_argument("--pretend", action="store_true", help="a tiny shape on the processor")
    given = parser.parse_args()
    if given.steps < 2:
        parser.error(f"--steps: got {given.steps}, expected at least 2: the first is not counted")
    halves = given.half or (("ours",) if given.adapter_rank else HALVES)
    if given.adapter_rank and set(halves) != {"ours"}:
        parser.error(f"--half: got {', '.join(halves)} with --adapter-rank, expected ours alone")
    out = given.out.resolve()
    work = Work(
        size=given.size,
        out=str(out),
        models=str((given.models or out / "models").resolve()),
        steps=given.steps,
        trl_rows=given.trl_rows or TRL_ROWS[given.size],
        trl_share=given.trl_share,
        adapter_rank=given.adapter_rank,
    )
    work = work.smallest() if given.pretend else work
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the processes of a half end too
        signal.signal(number, lambda *_: sys.exit(1))
    file = out / f"record-{work.size}.jsonl"
    done = [run_half(half, work, file, given.limit) for half in halves]
    print(json.dumps(compared(file, work)), flush=True)
    sys.exit(0 if all(done) else 1)


def run_half(half: str, work: Work, file: Path, limit_seconds: float) -> bool:
    """Run a half in processes of its own; return whether it reached its end."""
    record, began = Record(file, half), time.monotonic()
    about = {"work": work.shared, "device": device_facts(work.kind), "beside": others_on_card(work.kind)}
    record.add("begun", **about, versions=versions())
    word = "cut"
    try:
        is_done = measured(half, work, record, limit_seconds)
        word = "ended" if is_done else "not ended"
    finally:
        record.add(word, seconds=round(time.monotonic() - began, 1), beside=others_on_card(work.kind))
    return is_done


def measured(half: str, work: Work, record: Record, limit_seconds: float) -> bool:
    """Make the model, then run the half; return whether it reached its end."""
    out, model = Path(work.out), dict[str, Any]()
    log = out / f"{half}-{work.size}.log"
    if relayed("benchmarks.one_card.inputs", work.text, record, log, MAKE_SECONDS, seen=model.update):
        return False
    if half == "ours":
        from benchmarks.one_card.ours import measure

        return measure(work, record, out / f"ours-{work.size}-{os.getpid()}", model["parameters"], limit_seconds)
    if half in ("profile", "decoding"):
        module = {"profile": "kernels", "decoding": "decoding"}[half]
        return not relayed(f"benchmarks.one_card.{module}", work.text, record, log, limit_seconds)
    return trl(work, record, log, limit_seconds)


def trl(work: Work, record: Record, log: Path, limit_seconds: float) -> bool:
    """Run TRL, with half the rows at once as long as memory is short."""
    variables = {"TRL_EXPERIMENTAL_SILENCE": "1"} | (
        {"PYTHONPATH": os.environ["TRL_FOLDER"]} if "TRL_FOLDER" in os.environ else {}
    )
    while status := relayed("benchmarks.one_card.trl", work.text, record, log, limit_seconds, variables):
        if status != NO_MEMORY or work.trl_rows == 1:
            return False
        work = replace(work, trl_rows=work.trl_rows // 2)
    return True


def compared(file: Path, work: Work) -> dict[str, Any]:
    """Return the last line: seconds of a step of each half of a record, and their ratio if they can be compared."""
    line: dict[str, Any] = {"size": work.size, "record": str(file), "ours": None, "trl": None, "ratio": None}
    begun = {}
    for half in ("ours", "trl"):
        of_start = since_start(file, half)
        begun[half] = of_start.get("begun")
        line[half] = of_start.get("step seconds", {}).get("seconds")
    if line["ours"] and line["trl"]:
        same = [("work",), ("device", "card"), ("device", "uuid")]
        differ = [".".join(path) for path in same if at(begun["ours"], path) != at(begun["trl"], path)]
        if differ:
            line["why_no_ratio"] = f"the halves differ in {', '.join(differ)}"
        else:
            line["ratio"] = round(line["trl"] / line["ours"], 3)
    return line


def since_start(file: Path, half: str) -> dict[str, Mapping[str, Any]]:
    """Return the findings of the last start of a half, by name; of equal names the last."""
    found: dict[str, Mapping[str, Any]] = {}
    for each in findings(file):
        if each["half"] == half:
            found = {} if each["finding"] == "begun" else found
            found[each["finding"]] = each
    return found


def at(values: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path of keys."""
    for key in path:
        values = (values or {}).get(key)
    return values


if __name__ == "__main__":
    main()
