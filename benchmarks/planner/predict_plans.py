"""Predicted and measured seconds of PPO steps under many plans on this machine; prints JSON as its last line.

    python -m benchmarks.planner.predict_plans [--ranks 2] [--steps 3] [--batch-size 16] [--plans NAME ...]
        [--profile again] [--model FOLDER] [--prompts FILE]

Real Prefect, gang, Megatron-core and vLLM on CPU ranks of one thread, four models of SmolLM2's shape, the demo's
prompts; with 4 ranks, smaller random models whose heads 4 divides. Layers are profiled first (`prefect-rlhf profile`),
unless that was done before; then each plan is predicted and run. A step's seconds are the median difference of the ends
of `--steps` steps after the first. `auto` is what the search finds on the profile. `calls` says the same of each node
of a step, by the ranks' own clocks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from prefect.testing.utilities import prefect_test_harness

from benchmarks.beside_trl.our_ppo import flow_parameters
from benchmarks.beside_trl.ppo_work import PPOWork
from benchmarks.beside_trl.step_work import check_files
from benchmarks.planner.prepared_ppo import prepared_ppo
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.commands import cli
from prefect_rlhf.flows.hardware import profiles
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.placement.augmented.node import subject_of
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.tasks.model_shape import model_shape
from prefect_rlhf.tasks.reporting.comparison import step_ends
from prefect_rlhf.tasks.running.journal import TaskRunSpan, read_spans
from tests.support.plan_matrix import plan
from tests.support.runs import Compact, leased, plan_file
from tests.support.tiny import make_model, make_prompts

HELD_OUT = 8
DIFFERENT = 1.1  # plans whose measured seconds differ by less have no order

TWO_RANKS: Mapping[str, Compact] = {
    "one device": plan("0 engine=vllm", "0", "0", "0", "0", "0"),
    "pipelines": plan("0-1 dp2 engine=vllm", "0-1 pp2", "0-1 pp2", "0-1 pp2", "0-1 pp2", "0-1 pp2"),
    "pipelines, 4 micro-batches": plan(
        "0-1 dp2 engine=vllm",
        "0-1 pp2 micro_batches=4",
        "0-1 pp2 micro_batches=4",
        "0-1 pp2 micro_batches=4",
        "0-1 pp2 micro_batches=4",
        "0-1 pp2 micro_batches=4",
    ),
    "one copy generates and trains": plan(
        "0-1 dp2 engine=megatron", "0-1 dp2", "0-1 dp2", "0-1 dp2", "0-1 dp2", "0-1 dp2"
    ),
    "a pipeline generates and trains": plan(
        "0-1 pp2 engine=megatron micro_batches=2", "1", "0", "1", "0-1 pp2 micro_batches=2", "0-1 dp2"
    ),
    "apart, Megatron generates": plan("0 engine=megatron", "1", "0", "1", "0", "1 micro_batches=4"),
    "critic in a pipeline": plan("0-1 dp2 engine=vllm", "0", "1", "0", "0-1 dp2", "0-1 pp2 micro_batches=2"),
}
FOUR_RANKS: Mapping[str, Compact] = {
    "pipelines": plan("0-3 dp4 engine=vllm", "0-3 dp2 pp2", "0-3 dp2 pp2", "0-3 pp2 dp2", "0-3 dp2 pp2", "0-3 dp2 pp2"),
    "tensor parallel": plan("0-3 tp4 engine=vllm", "0-3 tp4", "0-3 dp2 tp2", "0-3 tp4", "0-3 dp2 tp2", "0-3 tp2 pp2"),
    "halves": plan("0-3 dp4 engine=vllm", "2-3 dp2", "0-1 dp2", "2-3 dp2", "0-1 dp2", "2-3 dp2"),
    "actor and critic apart": plan("0-1 dp2 engine=vllm", "2", "3", "2-3 dp2", "0-1 dp2", "2-3 pp2"),
}
PLANS: Mapping[int, Mapping[str, Compact]] = {2: TWO_RANKS, 4: FOUR_RANKS}


def main() -> None:
    """Profile, predict, run, compare, print."""
    arguments = parse_arguments()
    work = PPOWork(
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        steps=arguments.steps,
        threads=arguments.ranks,
        model=arguments.model,
        prompts=arguments.prompts,
    )
    rows: list[dict[str, Any]] = []
    with prefect_test_harness(server_startup_timeout=120), tempfile.TemporaryDirectory() as folder:
        work = small_work(work, Path(folder)) if arguments.ranks == 4 else demo_work(work, Path(folder))
        ensure_profile(work, arguments.profile == "again")
        for name, file in plans(work, arguments.plans, Path(folder)).items():
            try:
                rows.append(predicted_and_measured(name, file, work, Path(folder)))
            except InvalidInput as error:  # a preset that has no plan for so few devices
                print(f"{name}: {error}", flush=True)
            else:
                print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(work, rows)))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=sorted(PLANS), default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--model", default=PPOWork.model, help="of 2 ranks")
    parser.add_argument("--prompts", default=PPOWork.prompts, help="of 2 ranks")
    parser.add_argument("--plans", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--profile", choices=["again"], help="even if there is one")
    arguments = parser.parse_args()
    known = (*PRESETS, *PLANS[arguments.ranks], "auto")
    for name in arguments.plans or ():
        if name not in known:
            parser.error(f"--plans: got {name!r}, expected some of {', '.join(map(repr, known))}")
    return arguments


def demo_work(work: PPOWork, folder: Path) -> PPOWork:
    """The demo's model and prompts, few of them held out: evaluation, before and after all steps, is not measured."""
    check_files(work)
    table = pq.read_table(work.prompts)
    held_out = table.filter(pc.field("split") == "held_out").slice(0, HELD_OUT)
    few = folder / "prompts.parquet"
    pq.write_table(pa.concat_tables([table.filter(pc.field("split") == "train"), held_out]), few)
    return replace(work, prompts=str(few))


def small_work(work: PPOWork, folder: Path) -> PPOWork:
    """A random model of 70 million parameters, so that four ranks fit in memory, and prompts of a few tokens."""
    # A shard of the profile has a fourth of the vocabulary, and the tokens of a profile are below 32.
    model = make_model(folder / "model", layers=12, hidden=768, heads=24, vocab=128)
    prompts = make_prompts(folder / "prompts.parquet", work.batch_size * (work.steps + 1), HELD_OUT)
    return replace(work, model=model, prompts=prompts)


def ensure_profile(work: PPOWork, again: bool) -> None:
    """Measure the model's layers on as many ranks, unless that was done."""
    subject = profiles.Machine.read("cpu").subject(model_shape("model", work.model), "bfloat16", work.threads)
    if again or not profiles.profile_file(subject).is_file():
        longest = "64" if work.threads == 2 else "32"
        sizes = ["--rows", str(work.batch_size), "--longest", longest]
        print(cli.main(["profile", work.model, "--devices", str(work.threads), *sizes]))


def plans(work: PPOWork, chosen: Sequence[str] | None, folder: Path) -> dict[str, str]:
    """The parameter `plan` of the flow for each plan: a preset's name, a file, `auto`."""
    files = {name: str(plan_file(compact, folder / f"{name}.json")) for name, compact in PLANS[work.threads].items()}
    values = {**{name: name for name in PRESETS}, **files, "auto": "auto"}
    return {name: value for name, value in values.items() if chosen is None or name in chosen}


def predicted_and_measured(name: str, plan_parameter: str, work: PPOWork, folder: Path) -> dict[str, Any]:
    """One plan's row."""
    parameters = flow_parameters(work, folder / "runs") | {"plan": plan_parameter}
    with leased(work.threads):
        prepared = prepared_ppo(parameters)
        if not prepared.request.cost_sources.profiles:
            sys.exit("no profile for every model of the graph")
        state = ppo(**ppo.validate_parameters(parameters), return_state=True)
    if not state.is_completed():
        sys.exit(f"{name}: {state.message}")
    spans = read_spans(Path(state.result()["run_dir"]))
    prediction = prepared.prediction
    assert prediction is not None  # the profile knows the devices
    measured = median(after - before for before, after in pairwise(step_ends(spans)))
    return {
        "plan": name,
        "predicted_seconds": round(prediction.seconds_per_step, 3),
        "measured_seconds": round(measured, 3),
        "ratio": round(prediction.seconds_per_step / measured, 3),
        "calls": calls(prediction.seconds_by_subject, spans),
        "placements": plan_yaml(prepared.augmented.plan) if name == "auto" else None,
    }


def calls(predicted: Mapping[str, float], spans: Sequence[TaskRunSpan]) -> dict[str, list[float]]:
    """[predicted, measured] seconds that ranks worked on each node of a step, and what holding its devices took."""
    measured: dict[str, list[TaskRunSpan]] = {}
    for span in spans:
        if span.step > 1:
            measured.setdefault(subject_of(span.node), []).append(span)
    return {
        node: [
            round(predicted.get(node, 0.0), 3),
            round(median(span.seconds for span in runs), 3),
            round(median(span.end - span.start for span in runs), 3),
        ]
        for node, runs in measured.items()
    }


def summary(work: PPOWork, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last line."""
    errors = [abs(row["ratio"] - 1) for row in rows]
    measured = {row["plan"]: row["measured_seconds"] for row in rows}
    presets = [measured[name] for name in PRESETS if name in measured]
    shown = ("plan", "predicted_seconds", "measured_seconds", "ratio")
    return {
        "ranks": work.threads,
        "num_plans": len(rows),
        "plans": [{key: row[key] for key in shown} for row in rows],
        "rank_correlation": rank_correlation(rows),
        "pairs_in_order": pairs_in_order(rows),
        "max_error": round(max(errors), 3),
        "median_error": round(median(errors), 3),
        "auto_vs_best_preset": round(measured["auto"] / min(presets), 3) if presets and "auto" in measured else None,
    }


def rank_correlation(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Spearman's, of predicted and measured seconds."""
    if len(rows) < 3:
        return None
    predicted, measured = (
        sorted(range(len(rows)), key=lambda index: rows[index][key])
        for key in ("predicted_seconds", "measured_seconds")
    )
    squares = sum((predicted.index(row) - measured.index(row)) ** 2 for row in range(len(rows)))
    return round(1 - 6 * squares / (len(rows) * (len(rows) ** 2 - 1)), 4)


def pairs_in_order(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pairs whose measured seconds differ by more than 10%: how many, and those predicted in the other order."""
    apart = []
    for pair in combinations(rows, 2):
        fast, slow = sorted(pair, key=lambda row: row["measured_seconds"])
        if slow["measured_seconds"] > DIFFERENT * fast["measured_seconds"]:
            apart.append((fast, slow))
    wrong = [
        [fast["plan"], slow["plan"]] for fast, slow in apart if fast["predicted_seconds"] >= slow["predicted_seconds"]
    ]
    agreement = 1 - 2 * len(wrong) / len(apart) if apart else None
    return {"pairs": len(apart), "wrong": wrong, "rank_correlation": agreement and round(agreement, 4)}


if __name__ == "__main__":
    main()
