"""What each part of the planner gains: answers without one of its parts, beside the answers with all.

    python -m benchmarks.planner.ablation [--only 1,11,...] [--evaluations N] [--parts 'presets,fewest cuts']

The parts are values of `best_plan.ALL_PARTS`: searches for plans, passes over what they found, refinements of each
plan. Every answer has the same evaluations, and those of a part that is left out go to no other part. Each answer comes
from a fork of the same process, so all have the same caches.

A line for each question and part is JSON. `change` is the share by which the `seconds` of the answer, those of the
`fastest` plan found and the `bound` are larger without the part; null if no plan is found. The last line is JSON:
`questions`, `evaluations`, `processor_seconds` of the answers with all parts, and `parts`. By part these are the
questions with another answer (`acted`), those without a plan (`no_plan`), the mean change and the largest of `seconds`
and of `fastest`, and the largest fall of the bound.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from statistics import fmean
from typing import Any

from benchmarks.planner.referee import asked, questions
from prefect_rlhf.errors.errors import TooLittleMemory
from prefect_rlhf.placement.planner.best_plan import ALL_PARTS, Parts, plan_graph
from prefect_rlhf.placement.search.driver import warm_up

QUESTIONS = (1, 11, 40, 3, 39, 5)
"""Numbers of questions in `questions.txt`: PPO, ReMax, tiny batches, two nodes, two kinds of nodes, staleness."""
WARMING, WARMING_EVALUATIONS = 17, 2_000.0  # the question that is answered first, and discarded
EVALUATIONS = 100_000.0
NEEDED = "whole space"  # its search has the bound
NAMES = tuple(name for name in ALL_PARTS.names if name != NEEDED)
NUMBERS = ("seconds", "fastest", "bound")

Answer = Mapping[str, float]
"""The seconds of an answer, of the fastest plan that was found, the bound, and the processor seconds that it took."""


def main() -> None:
    """Print a line for each question and part, and the sums."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--only", default=",".join(map(str, QUESTIONS)), help="numbers of questions, from 1 on")
    flags.add_argument("--evaluations", type=float, default=EVALUATIONS, help="length of the search for each answer")
    flags.add_argument("--parts", default=",".join(NAMES), help="the parts to leave out")
    arguments = flags.parse_args()
    chosen = [name for name in arguments.parts.split(",") if name]
    if unknown := set(chosen) - set(NAMES):
        flags.error(f"--parts: got {', '.join(sorted(unknown))}, expected names from {', '.join(NAMES)}")
    lines = [questions()[int(number) - 1] for number in arguments.only.split(",")]
    warm_up("exact")
    plan_graph(asked(questions()[WARMING - 1]), evaluations=WARMING_EVALUATIONS)
    changes: dict[str, list[Answer | None]] = {name: [] for name in chosen}
    took = 0.0
    for line in lines:
        whole = answered(line, arguments.evaluations, ALL_PARTS)
        assert whole is not None, f"{line}: no plan with {arguments.evaluations:g} evaluations"
        took += whole["processor_seconds"]
        for name in chosen:
            change = changed(whole, answered(line, arguments.evaluations, ALL_PARTS.without(name)))
            changes[name].append(change)
            print(json.dumps({"question": line, "off": name, "change": change}), flush=True)
    sums = {"questions": len(lines), "evaluations": arguments.evaluations, "processor_seconds": took}
    print(json.dumps(sums | {"parts": {name: summary(changes[name]) for name in chosen}}))


def changed(whole: Answer, without: Answer | None) -> Answer | None:
    """Return by which share each number is larger without a part; None if no plan is found."""
    return None if without is None else {key: without[key] / whole[key] - 1 for key in NUMBERS}


def summary(changes: Sequence[Answer | None]) -> dict[str, Any]:
    """Return the sums of a part."""
    known = [change for change in changes if change is not None] or [dict.fromkeys(NUMBERS, 0.0)]
    return {
        "acted": sum(any(change.values()) for change in known),
        "no_plan": changes.count(None),
        "mean_seconds": fmean(change["seconds"] for change in known),
        "most_seconds": max(change["seconds"] for change in known),
        "mean_fastest": fmean(change["fastest"] for change in known),
        "most_fastest": max(change["fastest"] for change in known),
        "bound": min(change["bound"] for change in known),
    }


def answered(line: str, evaluations: float, parts: Parts) -> Answer | None:
    """Return the answer to a question from a fork of this process; None if no plan is found."""
    forks = multiprocessing.get_context("fork")
    receiver, sender = forks.Pipe(duplex=False)
    process = forks.Process(target=_answer, args=(line, evaluations, parts, sender))
    process.start()
    sender.close()  # so that the end of the process ends the wait
    answer: Answer | None = receiver.recv()
    process.join()
    return answer


def _answer(line: str, evaluations: float, parts: Parts, sender: Connection) -> None:
    began = time.process_time()
    try:
        found = plan_graph(asked(line), evaluations=evaluations, parts=parts)
    except TooLittleMemory:
        sender.send(None)
        return
    numbers = {"seconds": found.seconds, "fastest": found.fastest_seconds, "bound": found.lower_bound_seconds}
    sender.send(numbers | {"processor_seconds": time.process_time() - began})


if __name__ == "__main__":
    main()
