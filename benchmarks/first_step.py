"""The time from the command to the end of the first step, by parts, cold and warm; JSON as its last line.

    python -m benchmarks.first_step                             # the demo's model on this machine's processor
    python -m benchmarks.first_step --size 1.5b --kind cuda     # a random Qwen2.5 on a GPU
    python -m benchmarks.first_step --model FOLDER --prompts FILE

`prefect-rlhf run grpo` is started as a user would start it, and ended after its first step. The first round is cold:
the folders of Prefect, vLLM, Triton and torch's compiler are new. The others are warm: they find these folders.
Python's compiled modules and the files that the system keeps in memory are as they are. Parts are read from the run's
log and record; they add up to `all`, but for gaps that no line shows.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.beside_trl.step_work import StepWork
from benchmarks.one_card.card import device_facts, others_on_card, versions
from benchmarks.one_card.child import relayed, started
from benchmarks.one_card.ours import PARAMETERS, POLL_SECONDS, program, spans_of
from benchmarks.one_card.parts import log_of, parts_of
from benchmarks.one_card.record import Record
from benchmarks.one_card.work import SIZES, Work

LIMIT_SECONDS = 300.0
CACHES = {
    "PREFECT_HOME": "prefect",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}


def main() -> None:
    """Start a run in each round, print its parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), help="a random model of this size instead of --model")
    parser.add_argument("--model", default=StepWork.model)
    parser.add_argument("--prompts", default=StepWork.prompts)
    parser.add_argument("--kind", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--rounds", type=int, default=2, help="the first is cold, the others warm")
    parser.add_argument("--out", type=Path, default=Path("build/first_step"))
    given = parser.parse_args()
    out, is_random = given.out.resolve(), given.size is not None
    given_files = (
        {} if is_random else {name: str(Path(getattr(given, name)).resolve()) for name in ("model", "prompts")}
    )
    for name, file in given_files.items():
        if not Path(file).exists():
            sys.exit(f"--{name}: {file} does not exist; `make demo` writes it, or name a random model with --size")
    work = Work(
        size=given.size or "tiny",
        out=str(out),
        models=str(out / "models"),
        kind=given.kind,
        **{f"given_{name}": file for name, file in given_files.items()},
        **({} if given.kind == "cuda" else {"batch_size": 4, "response_tokens": 24}),
        steps=1,
    )
    record = Record(out / "record.jsonl", "first step")
    about = {"model": str(work.model), "device": device_facts(work.kind), "beside": others_on_card(work.kind)}
    record.add("begun", **about, versions=versions())
    if relayed("benchmarks.one_card.inputs", work.text, record, out / "inputs.log", LIMIT_SECONDS):
        sys.exit(1)
    found = {}
    base = out / f"rounds-{os.getpid()}"
    for number in range(given.rounds):
        word = "cold" if number == 0 else f"warm {number}"
        found[word] = round_of(work, record, base, word)
    print(json.dumps({"record": str(out / "record.jsonl"), "seconds": found}), flush=True)


def round_of(work: Work, record: Record, base: Path, word: str) -> float | None:
    """Run until the first step has ended; record its parts, and return the seconds of all of them."""
    folder = base / word.replace(" ", "-")
    folder.mkdir(parents=True)
    argument = json.dumps([work.text, str(folder)])
    if relayed("benchmarks.one_card.fitting", argument, record, folder / "plan.log", LIMIT_SECONDS):
        return None
    command = [str(program()), "run", "grpo", "--parameters", str(folder / PARAMETERS), "--devices", "1"]
    caches = {name: str(base / "caches" / place) for name, place in CACHES.items()}
    found: dict[str, Any] = {}
    began = time.time()
    variables = caches | {"VLLM_LOGGING_LEVEL": "INFO"}
    load = os.getloadavg()[0]
    with started([*command, "--kind", work.kind], folder / "run.log", variables) as process:
        while process.poll() is None and time.time() - began < LIMIT_SECONDS and "all" not in found.get("parts", {}):
            time.sleep(POLL_SECONDS)
            found = parts_of(log_of(folder / "runs"), spans_of(folder / "runs"), began)
    record.add(word, load=load, **found)
    seconds: float | None = found.get("parts", {}).get("all")
    return seconds


if __name__ == "__main__":
    main()
