"""`plan: auto` beside the best preset on the demo's model and prompts, by measured steps; prints JSON as its last line.

    python -m benchmarks.demo_step [--algorithm ppo|grpo] [--plans NAME ...] [--rounds 2] [--steps 3]
        [--model FOLDER] [--prompts FILE]

`auto` probes the machine first, unless it knows it. Plans run in turn, `--rounds` times each, so that a change of the
machine's load meets all of them. A step's seconds are the median of the steps after the first of all rounds.
`auto_over_best` is the ratio of auto's seconds to the least of all plans, `predicted_over_measured` is auto's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from prefect.testing.utilities import prefect_test_harness

from benchmarks import our_grpo, our_ppo
from benchmarks.grpo_work import GRPOWork
from benchmarks.ppo_work import PPOWork
from benchmarks.predict_plans import demo_work
from benchmarks.step_work import StepWork
from prefect_rlhf.blocks.lease import leased_devices
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.algorithm.rlhf_flow import AlgorithmFlow
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.flows.training.run import prepare
from prefect_rlhf.placement.plans.presets import PRESETS
from prefect_rlhf.tasks.reporting.comparison import step_ends
from prefect_rlhf.tasks.running.journal import read_spans
from tests.runs import leased

ALGORITHMS: Mapping[str, tuple[AlgorithmFlow, type[StepWork], Callable[[Any, Path], dict[str, Any]]]] = {
    "ppo": (ppo, PPOWork, our_ppo.flow_parameters),
    "grpo": (grpo, GRPOWork, our_grpo.flow_parameters),
}


def main() -> None:
    """Run each plan in turn, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="ppo")
    parser.add_argument("--plans", nargs="+", default=["auto", *PRESETS], metavar="NAME")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", default=StepWork.model)
    parser.add_argument("--prompts", default=StepWork.prompts)
    arguments = parser.parse_args()
    flow, kind, parameters_of = ALGORITHMS[arguments.algorithm]
    work = kind(model=arguments.model, prompts=arguments.prompts, steps=arguments.steps)
    seconds: dict[str, list[float]] = {}
    predicted: dict[str, float] = {}
    with prefect_test_harness(server_startup_timeout=120), tempfile.TemporaryDirectory() as folder:
        work = demo_work(work, Path(folder))
        for name in arguments.plans * arguments.rounds:
            parameters = parameters_of(work, Path(folder)) | {"plan": name, "output_dir": str(Path(folder, "runs"))}
            try:
                predicted[name], steps = predicted_and_measured(flow, parameters, work.threads)
            except InvalidInput as error:  # a preset that has no plan for so few devices
                print(f"{name}: {error}", flush=True)
                continue
            seconds.setdefault(name, []).extend(steps)
            print(f"{name}: predicted {predicted[name]:.2f} s, measured {median(seconds[name]):.2f} s", flush=True)
    print(json.dumps({"algorithm": arguments.algorithm, **summary(seconds, predicted)}))


def predicted_and_measured(
    flow: AlgorithmFlow, parameters: Mapping[str, Any], num_devices: int
) -> tuple[float, list[float]]:
    """Run under the plan of `parameters`; return the predicted seconds of a step, and the measured seconds of each."""
    options, arguments = RunOptions.split(flow.validate_parameters(dict(parameters)))
    with leased(num_devices):
        with leased_devices() as lease:
            prediction = prepare(flow.algorithm, arguments, options, lease).prediction
        state = flow(**flow.validate_parameters(dict(parameters)), return_state=True)
    if not state.is_completed():
        sys.exit(f"{parameters['plan']}: {state.message}")
    ends = step_ends(read_spans(Path(state.result()["run_dir"])))
    assert prediction is not None  # CPUs have a datasheet
    return prediction.seconds_per_step, [after - before for before, after in pairwise(ends)]


def summary(seconds: Mapping[str, list[float]], predicted: Mapping[str, float]) -> dict[str, Any]:
    """The last line."""
    measured = {name: median(steps) for name, steps in seconds.items()}
    auto = measured.get("auto")
    return {
        "plans": {name: [round(predicted[name], 2), round(measured[name], 2)] for name in measured},
        "auto_over_best": round(auto / min(measured.values()), 3) if auto else None,
        "predicted_over_measured": round(predicted["auto"] / auto, 3) if auto else None,
    }


if __name__ == "__main__":
    main()
