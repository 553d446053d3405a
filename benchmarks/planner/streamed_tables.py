"""When streamed parts win and lose by the estimate: seconds of an iteration in docs/internals/streamed_parts.md.

    python -m benchmarks.planner.streamed_tables [--only A,E] [--evaluations 100000]

For each setting: all calls on all devices; the best plan with generation on some devices, inferences on others and
training on all, in 1, 2 and 4 parts, for the best division of the devices; and one step ahead, `separation` and
`separation-streamed`, each with its best share. Responses have the tail that answers assume. A line for each setting;
the last line is JSON of all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator

from benchmarks.planner.referee import asked
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.graph import Call, DataflowGraph
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.preset_plan import best_admitted
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.planner.space.plan_problem import PlanSpace
from prefect_rlhf.placement.plans.presets import PRESETS, Preset, cut, preset_named
from prefect_rlhf.placement.search.budget import Budget

GRPO = "grpo --prompt-length 512"
PPO = "ppo --prompt-length 512 --response-length 512"
SETTINGS = {
    "A": f"{GRPO} --model actor=llama-3.1-8b --cluster 1x8:h100 --response-length 2048 --batch-size 64",
    "B": f"{GRPO} --model actor=llama-3.1-8b --cluster 4x8:h100 --response-length 16384 --batch-size 128"
    " -p algo.samples_per_prompt=16",
    "C": f"{GRPO} --model actor=qwen2.5-14b --cluster 4x8:h100 --response-length 4096 --batch-size 128",
    "D": f"{GRPO} --model actor=llama-3.1-70b --cluster 16x8:h100 --response-length 8192 --batch-size 128",
    "E": f"{PPO} --model actor=llama-7b --model critic=llama-7b --cluster 2x8:h100 --batch-size 512",
    "F": "ppo --prompt-length 512 --response-length 128 --model actor=llama-7b --model critic=llama-7b"
    " --model reward=llama-70b --cluster 4x8:h100 --batch-size 4096",
}
PARTS = (1, 2, 4)
RATIOS = (0.25, 0.5, 0.75)
"""Shares of the devices that are tried for generation, or for generation and inference one step ahead."""


def main() -> None:
    """Estimate each setting, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SETTINGS))
    parser.add_argument("--evaluations", type=float, default=100_000, help="of each search")
    arguments = parser.parse_args()
    budget = Budget.of(arguments.evaluations, None)
    rows = []
    for name in arguments.only.split(","):
        rows.append({"setting": name} | row(SETTINGS[name], budget))
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(rows))


def row(line: str, budget: Budget) -> dict[str, object]:
    """Return the estimates of a setting, in seconds of an iteration."""
    fresh, ahead = asked(line), asked(f"{line} -p staleness=1")
    together = best(fresh, [PRESETS["flattening"]], budget)
    apart = {
        parts: best(fresh, [Preset(apart_from, ratio, parts=parts) for ratio in RATIOS], budget) for parts in PARTS
    }
    return {
        "together": seconds(fresh, together),
        "together_by_kind": by_kind(fresh, together),
        "apart": {parts: seconds(fresh, plan) for parts, plan in apart.items()},
        "apart_by_kind": {parts: by_kind(fresh, plan) for parts, plan in apart.items()},
        "ahead": seconds(ahead, best(ahead, with_ratios("separation"), budget)),
        "ahead_streamed": seconds(ahead, best(ahead, with_ratios("separation-streamed"), budget)),
    }


def apart_from(call: Call, mesh: DeviceMesh, graph: DataflowGraph, ratio: float) -> DeviceMesh:
    """Place generation on the first part, inference on the second, training on all devices."""
    if call.kind in ("train_step", "compute"):
        return mesh
    first, second = cut(mesh, ratio)
    return first if call.kind == "generate" else second


def with_ratios(name: str) -> Iterator[Preset]:
    """Yield a preset with each share."""
    yield from (preset_named(f"{name}:{ratio}") for ratio in RATIOS)


def best(question: Question, rules: Iterable[Preset], budget: Budget) -> ExecutionPlan | None:
    """Return the fastest plan that one of the rules admits; None if nothing fits."""
    space, plans = PlanSpace.of(question), []
    for rule in rules:
        try:
            plans.append(best_admitted(question, space, "tried", rule, budget))
        except InvalidInput:  # the devices have no such share
            continue
    return min((plan for plan in plans if plan is not None), key=question.seconds, default=None)


def seconds(question: Question, plan: ExecutionPlan | None) -> float | None:
    """Return the seconds of an iteration."""
    return None if plan is None else round(question.seconds(plan), 2)


def by_kind(question: Question, plan: ExecutionPlan | None) -> dict[str, float]:
    """Return the seconds of each kind of call in an iteration, calls at the same time added up."""
    found: dict[str, float] = {}
    if plan is not None:
        estimate = question.estimate(plan)
        for slot in estimate.schedule.slots:
            if slot.node.step == estimate.first_step and slot.node.kind in ("generate", "inference", "train_step"):
                found[slot.node.kind] = found.get(slot.node.kind, 0.0) + slot.end - slot.start
    return {kind: round(value, 2) for kind, value in found.items()}


if __name__ == "__main__":
    main()
