"""Our side of `ppo_step.py`: the flow `rlhf/ppo` on a leased mesh of `threads` CPU ranks, with a Prefect server."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ppo_work import Measured, PPOWork
from prefect_rlhf.flows.commands import cli
from prefect_rlhf.flows.demo.outcome import read_metrics
from prefect_rlhf.tasks.running.journal import read_spans


def main() -> None:
    """Train on one rank per thread, print what a step took."""
    work = PPOWork(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        parameters = Path(folder) / "parameters.json"
        parameters.write_text(json.dumps(flow_parameters(work, Path(folder))))
        status = cli.main(["ppo", "--parameters", str(parameters), "--devices", str(work.threads)])
        if status:
            sys.exit(status)
        print(json.dumps(asdict(measured(work, Path(folder) / "latest"))))


def flow_parameters(work: PPOWork, folder: Path) -> dict[str, Any]:
    """Parameters of the flow: one step more than is measured; evaluation only before the first and after the last."""
    scored = {"path": work.model, "head": "scalar", "new_head": True}
    optimizer = {"lr": work.learning_rate}
    return {
        "prompts": {"path": work.prompts},
        "held_out": {"path": work.prompts, "split": "held_out"},
        "actor": {"path": work.model},
        "ref": {"path": work.model},
        "critic": scored,
        "reward": scored,
        "output_dir": str(folder),
        "steps": work.steps + 1,
        "plan": work.plan,
        "algo": {
            "batch_size": work.batch_size,
            "sampling": {"max_new_tokens": work.response_tokens, "stop_at_eos": False},
            "update": {"epochs": work.epochs, "mini_batches": work.mini_batches},
            "kl": {"coefficient": work.kl_coefficient},
            "actor_optimizer": optimizer,
            "critic_optimizer": optimizer,
            "evaluate_every": work.steps + 1,
        },
    }


def measured(work: PPOWork, run_dir: Path) -> Measured:
    """Medians over the steps after the first, by the controller's clock; of a call with the transfers that feed it."""
    steps = [step for step in read_metrics(run_dir) if 1 <= step["step"] <= work.steps]
    seconds_per_call: dict[str, float] = {}
    for span in read_spans(run_dir):
        if 1 <= span.step <= work.steps:
            call = span.call or span.kind
            seconds_per_call[call] = seconds_per_call.get(call, 0.0) + (span.end - span.start) / work.steps
    return Measured(
        seconds_per_step=median(step["seconds"] for step in steps),
        seconds_per_call=dict(sorted(seconds_per_call.items())),
        details={
            share: round(median(step[share] for step in steps), 4)
            for share in ("orchestration_share", "fingerprint_share")
        },
    )


if __name__ == "__main__":
    main()
