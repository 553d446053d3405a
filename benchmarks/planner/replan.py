"""Total seconds of GRPO while responses grow: with `replan: switch`, with a fixed plan, and with a plan for each half.

    python -m benchmarks.planner.replan [--steps 60] [--growing 40] [--first 64] [--last 256] [--memory-mib 150]
        [--every 20] [--only NAME ...] [--prompts 8] [--samples 2] [--mini-batches 2] [--hidden 128] [--layers 24]

Real Prefect, gang, Megatron-core and vLLM on two CPU ranks; a model that counts down from the number in its prompt
(`countdown_model.py`), so lengths grow in a straight line from `--first` to `--last` tokens over the first
`--growing` steps, and stay there. The memory of a rank holds models and a key-value cache for the first lengths, or a
larger cache and models that leave it between their calls. The machine is probed first, unless it is known, and each
plan is the planner's answer for some lengths.

`fixed` keeps the best plan for the first lengths, with `replan: say`. `switch` begins with the same plan, and switches
by itself. `halves` has the best plan for the lengths of the first half, and switches to that of the second half. Total
seconds are from the start of the first step to the end of the last, switches included. `gain` is the total of `fixed`
divided by that of `switch`, `over_halves` how much longer `switch` takes than `halves`, `say_share` the share of
`fixed` that its threads spent in the check of `replan: say`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from prefect.testing.utilities import prefect_test_harness

from benchmarks.planner import countdown
from benchmarks.planner.countdown_model import make_countdown
from prefect_rlhf.blocks.lease import leased_devices
from prefect_rlhf.files.yaml_text import read_yaml
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.hardware.probes import probed_speeds
from prefect_rlhf.flows.training.choice.auto_plan import AUTO, EVALUATIONS
from prefect_rlhf.flows.training.choice.plans_by_step import PLANS_FILE
from prefect_rlhf.flows.training.replan.price_check import PriceCheck
from prefect_rlhf.placement.cost.workload import LengthDistribution
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.tasks.data.rows.row_order import row_ids
from prefect_rlhf.tasks.reporting.comparison import step_ends
from prefect_rlhf.tasks.running.journal import Journal, TaskRunSpan, read_spans
from tests.runs import leased, prepared, rollouts

RANKS, SEED, DTYPE = 2, 1, "bfloat16"
NAMES = ("fixed", "halves", "switch")
REWARD = {"function": f"{Path(countdown.__file__).resolve()}:first_words", "signature": "trl"}


def main() -> None:
    """Probe, choose plans, run and print."""
    arguments = parse_arguments()
    found: dict[str, dict[str, Any]] = {}
    with (
        prefect_test_harness(server_startup_timeout=120),
        tempfile.TemporaryDirectory() as folder,
        leased(RANKS, memory_bytes=int(arguments.memory_mib * (1 << 20))),
    ):
        with leased_devices() as lease:
            probed_speeds(lease, [DTYPE], print)
            given = flow_parameters(arguments, Path(folder))
            options = options_of(arguments, given, lease, Path(folder))
        for name in arguments.only:
            found[name] = timed(given | options[name], lengths(arguments))
            print(json.dumps({name: found[name]}), flush=True)
    print(json.dumps(summary(arguments.steps, found)))


def options_of(
    arguments: argparse.Namespace, given: dict[str, Any], lease: Lease, folder: Path
) -> dict[str, dict[str, Any]]:
    """Return the options of each run, with answers of the planner, and print the seconds that it predicts."""
    tokens, half, files = lengths(arguments), arguments.steps // 2, {}
    first = {"plan": AUTO, "expected_response_length": str(tokens[0])}
    fixed = prepared(grpo, given | first | {"dry_run": True}, lease)
    question, predicted = fixed.request.question, {}
    predicted["fixed"] = seconds(question, fixed.chosen.plan, tokens)
    for step, part in ((1, tokens[:half]), (half + 1, tokens[half:])):
        best = best_plan(question, part)
        predicted[f"from {step}"] = seconds(question, best, part)
        files[step] = folder / f"from_{step}.yaml"
        files[step].write_text(plan_yaml(best))
    print(json.dumps({"predicted": predicted}), flush=True)
    return {
        "fixed": first,
        "halves": {"plan": {step: str(file) for step, file in files.items()}},
        "switch": {**first, "replan": "switch", "replan_every": arguments.every},
    }


def best_plan(question: Question, tokens: Sequence[int]) -> ExecutionPlan:
    """Return the plan that takes the least seconds for these steps, of the answers for three of their lengths."""
    some = dict.fromkeys((tokens[0], tokens[len(tokens) // 2], tokens[-1]))
    plans = [plan_graph(expecting(question, length), evaluations=EVALUATIONS).plan for length in some]
    return min(plans, key=lambda plan: seconds(question, plan, tokens))


def seconds(question: Question, plan: ExecutionPlan, tokens: Iterable[int]) -> float:
    """Return the predicted seconds of steps whose responses have these lengths."""
    return round(sum(expecting(question, length).seconds(plan) for length in tokens), 1)


@cache
def expecting(question: Question, length: int) -> Question:
    """Return the question for responses of this length; memory counts the longest in any case."""
    responses = LengthDistribution.fixed(length).reaching(question.workload.responses.longest)
    return replace(question, workload=replace(question.workload, responses=responses))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"steps": 60, "growing": 40, "first": 64, "last": 256, "every": 20}
    numbers |= {"prompts": 8, "samples": 2, "mini-batches": 2}
    for name, default in (numbers | {"hidden": 128, "layers": 24}).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--memory-mib", type=float, default=150, help="memory of a rank")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    return parser.parse_args()


def lengths(arguments: argparse.Namespace) -> list[int]:
    """Return the tokens of each response, by step."""
    grown = max(1, min(arguments.growing, arguments.steps) - 1)  # the first step whose responses have the last length
    growth = (arguments.last - arguments.first) / grown
    return [round(arguments.first + growth * min(step, grown)) for step in range(arguments.steps)]


def flow_parameters(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write model and prompts, and return the flow's parameters. Prompts are where the run's order takes them."""
    most, num_prompts = max(arguments.first, arguments.last), arguments.prompts * arguments.steps
    model = make_countdown(folder / "model", most=most, hidden=arguments.hidden, layers=arguments.layers)
    texts = [""] * num_prompts
    for step, length in enumerate(lengths(arguments), start=1):
        for item in row_ids(step, arguments.prompts, SEED, num_prompts):
            texts[item] = countdown.prompt(length)
    held_out = [countdown.prompt(2)] * RANKS
    splits = ["train"] * num_prompts + ["held_out"] * RANKS
    pq.write_table(pa.table({"prompt": [*texts, *held_out], "split": splits}), folder / "prompts.parquet")
    prompts = {"path": str(folder / "prompts.parquet")}
    return {
        "prompts": prompts,
        "held_out": {**prompts, "split": "held_out"},
        "actor": {"path": model, "dtype": DTYPE},
        "reward": {"functions": {"first_words": REWARD}},
        "output_dir": str(folder / "runs"),
        "steps": arguments.steps,
        "seed": SEED,
        "algo": {
            "batch_size": arguments.prompts,
            "samples_per_prompt": arguments.samples,
            "sampling": {"max_new_tokens": most},
            "update": {"mini_batches": arguments.mini_batches},
            "kl": {"coefficient": 0},
            "optimizer": {"lr": 1e-7},
            "evaluate_every": arguments.steps,
        },
    }


def timed(parameters: dict[str, Any], expected: Sequence[int]) -> dict[str, Any]:
    """Run the flow; return the seconds of all steps and of switches, and the plans by step."""
    said: list[float] = []
    ended = PriceCheck.step_ended

    def step_ended(check: PriceCheck, journal: Journal) -> str | None:
        began = time.perf_counter()
        line = ended(check, journal)
        said.append(time.perf_counter() - began)
        return line

    PriceCheck.step_ended = step_ended  # type: ignore[method-assign]  # with a stopwatch
    try:
        state = grpo(**grpo.validate_parameters(parameters), return_state=True)
    finally:
        PriceCheck.step_ended = ended  # type: ignore[method-assign]
    if not state.is_completed():
        sys.exit(str(state.message))
    run_dir = Path(state.result()["run_dir"])
    made = [max(map(len, step)) for step in rollouts(run_dir, "logprobs")]
    if made != list(expected):
        sys.exit(f"responses have {made} tokens, expected {list(expected)}")
    spans = read_spans(run_dir)
    ends = [0.0, *step_ends([span for span in spans if span.step > 0])]
    each = [after - before for before, after in pairwise(ends)]
    half = len(each) // 2
    plans = read_yaml("plan", run_dir / PLANS_FILE) if (run_dir / PLANS_FILE).is_file() else {1: {}}
    return {
        "seconds": round(ends[-1], 2),
        "switch_seconds": [round(span.end - span.start, 2) for span in spans if span.kind == "switch"],
        "halves": [round(sum(each[:half]), 2), round(sum(each[half:]), 2)],
        "each": [round(value, 2) for value in each],
        "nodes": nodes(spans, half),
        "plans": {step: plan.get("name") for step, plan in plans.items()},
        "say_seconds": round(sum(said), 4),
    }


def nodes(spans: Sequence[TaskRunSpan], half: int) -> dict[str, list[float]]:
    """Return the mean seconds of each node in both halves."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for span in spans:
        subject = span.node.rpartition("@")[0]
        found.setdefault(subject, ([], []))[span.step > half].append(span.end - span.start)
    return {name: [round(mean(values), 3) for values in pair if values] for name, pair in found.items()}


def summary(steps: int, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the last line."""
    took = {name: each["seconds"] for name, each in found.items()}
    switched = [step for step in found.get("switch", {}).get("plans", {}) if step > 1]
    return {
        "steps": steps,
        "seconds": took,
        "gain": round(took["fixed"] / took["switch"], 3) if {"fixed", "switch"} <= took.keys() else None,
        "over_halves": round(took["switch"] / took["halves"] - 1, 3) if {"halves", "switch"} <= took.keys() else None,
        "switched_at": switched,
        "say_share": round(found["fixed"]["say_seconds"] / took["fixed"], 5) if "fixed" in took else None,
    }


if __name__ == "__main__":
    main()
