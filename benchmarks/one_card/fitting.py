"""The plan of a run on one device: the fewest micro-batches whose certificate fits, a power of two.

In a process of its own it writes the parameters of the run, with the plan, and prints the plan as a finding.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.one_card.memory import certified
from benchmarks.one_card.ours import PARAMETERS
from benchmarks.one_card.work import Work
from prefect_rlhf.errors.errors import InvalidInput, PlanDoesNotFit
from prefect_rlhf.flows.forms.options import RunOptions
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.hardware.device_kind import unheld_devices
from prefect_rlhf.flows.training.run import PreparedRun, prepare
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.memory.certificate import Certificate, certify_plan
from prefect_rlhf.placement.memory.remedies import with_changes
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.plans.plan_file import plan_yaml

VLLM, TRAINED = ("actor_generate", "actor_evaluation"), "actor_train"
COMPUTED = ("score", "grpo_advantages", "record_rollouts", "reward_evaluation", "record_evaluation")
VARIANTS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "all resident": {},
    "vllm offloaded": {"vllm": {"offload": "all"}},
    "recompute all": {"megatron": {"recompute": "all"}},
    "optimizer offloaded": {"megatron": {"offload": "optimizer"}},
    "vllm and optimizer offloaded": {"vllm": {"offload": "all"}, "megatron": {"offload": "optimizer"}},
}
"""What a plan does to fit, the cheapest first."""


@dataclass(frozen=True)
class Fitting:
    """A plan that fits, as a file, with its certificate, and the predictions for it by call."""

    name: str
    micro_batches: int
    text: str
    certificate: Certificate
    seconds_per_step: float | None
    seconds_by_call: Mapping[str, float]


def fitting_plan(parameters: Mapping[str, Any], folder: Path, kind: Any, lease: Lease | None = None) -> Fitting:
    """Return the first variant that fits, with the fewest micro-batches. Raises PlanDoesNotFit if none fits."""
    lease, refused = lease or unheld_devices(1, kind), None
    rows = parameters["algo"]["batch_size"] * parameters["algo"]["samples_per_prompt"]
    for name, changes in VARIANTS.items():
        try:
            prepared = _prepared(parameters, plan_text(name, rows, changes), folder, lease)
        except PlanDoesNotFit as error:
            refused = refused or error
            continue
        count, plan = next(_fit(prepared, rows))
        return _fitting(name, count, _prepared(parameters, plan_yaml(plan), folder, lease))
    assert refused is not None
    raise refused


def plan_text(name: str, micro_batches: int, changes: Mapping[str, Mapping[str, str]]) -> str:
    """Return a plan file of GRPO on one device: vLLM generates, Megatron trains."""
    where = {"mesh": "n0:0", "dp": 1, "tp": 1, "pp": 1}
    vllm = {**where, "engine": "vllm", "offload": "none", **changes.get("vllm", {})}
    python = {**where, "engine": "python", "micro_batches": 1, "offload": "none"}
    trained = {**where, "engine": "megatron", "micro_batches": micro_batches, "offload": "none"}
    calls = dict.fromkeys(VLLM, vllm) | dict.fromkeys(COMPUTED, python)
    calls[TRAINED] = trained | dict(changes.get("megatron", {}))
    lines = [f"name: {name.replace(' ', '-')}", "calls:"]
    for call, placed in calls.items():
        words = ", ".join(f"{key}: {value!r}" if key == "mesh" else f"{key}: {value}" for key, value in placed.items())
        lines.append(f"  {call}: {{{words}}}")
    return "\n".join(lines) + "\n"


def _prepared(parameters: Mapping[str, Any], text: str, folder: Path, lease: Lease) -> PreparedRun:
    """Prepare the run under a plan, as a dry run does."""
    file = folder / "plan.yaml"
    file.write_text(text)
    given = grpo.validate_parameters({**parameters, "plan": str(file), "dry_run": True})
    options, arguments = RunOptions.split(given)
    return prepare(grpo.algorithm, arguments, options, lease)


def _fit(prepared: PreparedRun, rows: int) -> Iterator[tuple[int, ExecutionPlan]]:
    """Yield each number of micro-batches whose plan fits, the fewest first."""
    request, plan = prepared.request, prepared.chosen.plan
    trained = [call for call in request.graph if call.name == TRAINED]
    count = 1
    while count <= rows:
        changed = with_changes(plan, trained, micro_batches=count)
        if certify_plan(changed, request.graph, request.workload, request.lease.kind).fits:
            yield count, changed
        count *= 2
    yield rows, plan  # it was prepared, so it fits


def _fitting(name: str, count: int, prepared: PreparedRun) -> Fitting:
    prediction, plan = prepared.prediction, prepared.chosen.plan
    by_call = {} if prediction is None else dict(prediction.seconds_by_subject)
    step = None if prediction is None else prediction.seconds_per_step
    return Fitting(name, count, plan_yaml(plan), prepared.chosen.certificate, step, by_call)


def flow_parameters(work: Work, folder: Path) -> dict[str, Any]:
    """Return the parameters of the run: as a user writes them, no evaluation during training."""
    prompts = {"path": str(work.prompts)}
    reward = f"{Path(__file__).resolve().with_name('reward.py')}:even"
    return {
        "prompts": prompts,
        "held_out": {**prompts, "split": "held_out"},
        "actor": {"path": str(work.model)},
        "reward": {"functions": {"even": {"function": reward, "signature": "trl"}}},
        "output_dir": str(folder / "runs"),
        "steps": work.steps,
        "algo": {
            "batch_size": work.batch_size,
            "samples_per_prompt": work.samples,
            "sampling": {"max_new_tokens": work.response_tokens, "stop_at_eos": False},
            "kl": {"coefficient": 0},
            "optimizer": {"lr": 1e-6},
            "evaluate_every": 1000,
        },
    }


def main() -> None:
    """Write `parameters.yaml` and `plan.yaml` into the folder; print the plan. Exits with a line if none fits."""
    text, place = json.loads(sys.argv[1])
    work, folder, began = Work.read(text), Path(place), time.monotonic()
    given = flow_parameters(work, folder)
    try:
        found = fitting_plan(given, folder, work.kind)
    except InvalidInput as error:
        sys.exit(f"no plan: {str(error).splitlines()[0]}")
    (folder / PARAMETERS).write_text(yaml.safe_dump({**given, "plan": str(folder / "plan.yaml")}))
    seconds = found.seconds_per_step
    line = {
        "finding": "plan",
        "plan": found.name,
        "micro_batches": found.micro_batches,
        "predicted_step_seconds": None if seconds is None else round(seconds, 4),
        "predicted_seconds": {name: round(value, 4) for name, value in found.seconds_by_call.items()},
        "certified": certified(json.loads(found.certificate.to_json())),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
