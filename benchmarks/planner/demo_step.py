"""`plan: auto` and every preset with either generation engine, by measured steps of the demo; prints JSON last.

    python -m benchmarks.planner.demo_step [--algorithm ppo|grpo] [--plans NAME ...] [--rounds 2] [--steps 3]
        [--model FOLDER] [--prompts FILE]

The job is the deployment `rlhf/ppo` or `rlhf/grpo` of prefect.yaml, with a reward model of the same shape and with
responses of equal length, so that all steps have the same work. `auto` probes the machine first, unless it knows it.
A NAME is `auto`, a preset, or a preset and an engine, such as `split/megatron`; the default is all of them. A plan that
two names share runs once. Plans run in turn, `--rounds` times each, so that a change of the machine's load affects all
of them. A step's seconds are the median of the steps after the first, over all rounds. `auto_over_best` is the ratio of
auto's seconds to the least of all plans, `predicted_over_measured` is auto's. Each run also prints its plan, and for
each node of a step [predicted, worked, held] seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from prefect.testing.utilities import prefect_test_harness

from benchmarks.beside_trl.our_ppo import with_scalar_head
from benchmarks.beside_trl.ppo_work import PPOWork
from benchmarks.planner.predict_plans import calls, demo_work
from prefect_rlhf.blocks.lease import leased_devices
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.run import PreparedRun, prepare
from prefect_rlhf.flows.training.spec.plan_choice import AUTO
from prefect_rlhf.flows.training.spec.run_spec import asked_run
from prefect_rlhf.placement.engine_traits import engines_of
from prefect_rlhf.placement.plan import EngineKind, ExecutionPlan
from prefect_rlhf.placement.plans.plan_file import plan_yaml
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.tasks.reporting.comparison import step_ends
from prefect_rlhf.tasks.running.journal import read_spans
from tests.support.runs import leased

ALGORITHMS: Mapping[str, AlgorithmFlow] = {"ppo": ppo, "grpo": grpo}
DEPLOYMENTS = Path(__file__).resolve().parents[2] / "prefect.yaml"
NUM_DEVICES = 2  # of the deployments' work pool


def main() -> None:
    """Run each plan in turn, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="ppo")
    parser.add_argument("--plans", nargs="+", default=list(every_plan()), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", default=PPOWork.model)
    parser.add_argument("--prompts", default=PPOWork.prompts)
    arguments = parser.parse_args()
    flow = ALGORITHMS[arguments.algorithm]
    seconds: dict[str, list[float]] = {}
    predicted: dict[str, float] = {}
    with (
        prefect_test_harness(server_startup_timeout=120),
        tempfile.TemporaryDirectory() as folder,
        leased(NUM_DEVICES),
    ):
        parameters = job(arguments, Path(folder))
        plans = different_plans(flow, parameters, arguments.plans, Path(folder))
        for name, plan in [*plans.items()] * arguments.rounds:
            predicted[name], steps = predicted_and_measured(flow, parameters | {"plan": plan}, name)
            seconds.setdefault(name, []).extend(steps)
            print(f"{name}: predicted {predicted[name]:.2f} s, measured {median(seconds[name]):.2f} s", flush=True)
    print(json.dumps({"algorithm": arguments.algorithm, **summary(seconds, predicted)}))


def every_plan() -> Iterator[str]:
    """Yield `auto`, and each preset with each engine that can generate."""
    yield AUTO
    for preset in PRESETS:
        yield from (f"{preset}/{engine}" for engine in engines_of("generate"))


def job(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the parameters of the deployment, with the given files; the reward model has a random head.

    There is a step more than is measured, and evaluation only before the first and after the last.
    """
    deployments = yaml.safe_load(DEPLOYMENTS.read_text())["deployments"]
    deployed = next(each["parameters"] for each in deployments if each["name"] == arguments.algorithm)
    prompts = demo_work(PPOWork(model=arguments.model, prompts=arguments.prompts), folder).prompts
    policy = {"path": arguments.model}
    scorer = {"path": str(with_scalar_head(Path(arguments.model), folder / "scorer")), "head": "scalar"}
    models = {"actor": policy, "ref": policy, "reward": scorer, "critic": scorer}
    return {
        **deployed,
        **{role: model for role, model in models.items() if role in deployed},
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "algo": {**deployed["algo"], "sampling": {"stop_at_eos": False}, "evaluate_every": arguments.steps + 1},
        "steps": arguments.steps + 1,
        "checkpoint_every": None,
        "output_dir": str(folder / "runs"),
    }


def different_plans(
    flow: AlgorithmFlow, parameters: Mapping[str, Any], names: Sequence[str], folder: Path
) -> dict[str, str]:
    """Return the parameter `plan` of each name: `auto`, or a file. A plan that an earlier name has is left out."""
    plans, known = dict[str, str](), dict[object, str]()
    for name in names:
        if name == AUTO:
            plans[name] = name
            continue
        preset, _, word = name.partition("/")
        engine = next((engine for engine in engines_of("generate") if engine == word), None)
        if word and engine is None:
            sys.exit(f"--plans: got {name!r}, expected one of {', '.join(engines_of('generate'))} after {preset}/")
        try:
            prepared = prepared_run(flow, {**parameters, "plan": preset})
        except InvalidInput as error:  # a preset that has no plan for so few devices
            print(f"{name}: {error}", flush=True)
            continue
        plan = generated_by(engine, prepared) if engine else prepared.chosen.plan
        if plan.placements in known:
            print(f"{name}: the same plan as {known[plan.placements]}", flush=True)
            continue
        known[plan.placements] = name
        plans[name] = str(folder / f"{name.replace('/', '-')}.yaml")
        Path(plans[name]).write_text(plan_yaml(plan))
    return plans


def generated_by(engine: EngineKind, prepared: PreparedRun) -> ExecutionPlan:
    """Return the plan of a run with `engine` in all its generate calls."""
    plan, graph = prepared.chosen.plan, prepared.request.graph
    generates = {call.name for call in graph if call.kind == "generate"}
    placements = tuple(
        (name, replace(placed, engine=engine, cache_gib=None) if name in generates else placed)
        for name, placed in plan.placements
    )
    return replace(plan, placements=placements)


def prepared_run(flow: AlgorithmFlow, parameters: Mapping[str, Any]) -> PreparedRun:
    """Prepare a run on the devices that are leased to this process."""
    asked = asked_run(flow.algorithm, flow.validate_parameters(dict(parameters)))
    with leased_devices() as lease:
        return prepare(asked, lease)


def predicted_and_measured(flow: AlgorithmFlow, parameters: Mapping[str, Any], name: str) -> tuple[float, list[float]]:
    """Run under the plan of `parameters`; return the predicted seconds of a step, and the measured seconds of each."""
    prepared = prepared_run(flow, parameters)
    prediction = prepared.prediction
    assert prediction is not None  # CPUs have a datasheet
    state = flow(**flow.validate_parameters(dict(parameters)), return_state=True)
    if not state.is_completed():
        sys.exit(f"{name}: {state.message}")
    spans = read_spans(Path(state.result()["run_dir"]))
    print(plan_yaml(prepared.chosen.plan), json.dumps(calls(prediction.seconds_by_subject, spans)), flush=True)
    return prediction.seconds_per_step, [after - before for before, after in pairwise(step_ends(spans))]


def summary(seconds: Mapping[str, list[float]], predicted: Mapping[str, float]) -> dict[str, Any]:
    """Return the last line."""
    measured = {name: median(steps) for name, steps in seconds.items()}
    auto = measured.get(AUTO)
    return {
        "plans": {name: [round(predicted[name], 2), round(measured[name], 2)] for name in measured},
        "auto_over_best": round(auto / min(measured.values()), 3) if auto else None,
        "predicted_over_measured": round(predicted[AUTO] / auto, 3) if auto else None,
    }


if __name__ == "__main__":
    main()
