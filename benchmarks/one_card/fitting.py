"""The plan of a run on one device: the default preset, completed as the run completes it.

In a process of its own it writes the parameters of the run, and prints the plan as a finding.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.one_card.child import say
from benchmarks.one_card.memory import certified, rounded
from benchmarks.one_card.ours import PARAMETERS
from benchmarks.one_card.work import Work
from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.flows.grpo import grpo
from prefect_rlhf.flows.hardware.device_kind import unheld_devices
from prefect_rlhf.flows.training.run import PreparedRun, prepare
from prefect_rlhf.flows.training.spec.run_spec import asked_run
from prefect_rlhf.placement.devices.lease import Lease
from prefect_rlhf.placement.plans.plan_file import plan_yaml


def prepared(parameters: Mapping[str, Any], kind: Any, lease: Lease | None = None) -> PreparedRun:
    """Prepare the run as a dry run does, with its completed plan. Raises PlanDoesNotFit if none fits."""
    asked = asked_run(grpo.algorithm, grpo.validate_parameters({**parameters, "dry_run": True}))
    return prepare(asked, lease or unheld_devices(1, kind))


def flow_parameters(work: Work, folder: Path) -> dict[str, Any]:
    """Return the parameters of the run: as a user writes them, no evaluation during training."""
    prompts = {"path": str(work.prompts)}
    reward = f"{Path(__file__).resolve().with_name('reward.py')}:even"
    return {
        "prompts": prompts,
        "held_out": {**prompts, "split": "held_out"},
        "actor": {"path": str(work.model)} | ({"adapter": {"rank": work.adapter_rank}} if work.adapter_rank else {}),
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
    """Write `parameters.yaml` into the folder; print the plan. Exits with a line if none fits."""
    text, place = json.loads(sys.argv[1])
    work, folder, began = Work.read(text), Path(place), time.monotonic()
    given = flow_parameters(work, folder)
    try:
        found = prepared(given, work.kind)
    except InvalidInput as error:
        sys.exit(f"no plan: {str(error).splitlines()[0]}")
    (folder / PARAMETERS).write_text(yaml.safe_dump(given))
    prediction, plan = found.prediction, found.chosen.plan
    say(
        "plan",
        plan=plan.name,
        calls=plan_yaml(plan),
        micro_batches=plan["actor_train"].micro_batches,
        predicted_step_seconds=rounded(prediction.seconds_per_step if prediction else None),
        predicted_seconds={name: rounded(value) for name, value in prediction.seconds_by_subject.items()}
        if prediction
        else {},
        certified=certified(json.loads(found.chosen.certificate.to_json())),
        seconds=round(time.monotonic() - began, 1),
    )


if __name__ == "__main__":
    main()
