"""Our side of `ppo_step.py`: the flow `rlhf/ppo` on a leased mesh of `threads` CPU ranks, with a Prefect server."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ppo_work import Measured, PPOWork


def main() -> None:
    """Run the steps, print what they took."""
    work = PPOWork(**json.loads(sys.argv[1]))
    with tempfile.TemporaryDirectory() as folder:
        run_dir = run(work, Path(folder))
        print(json.dumps(asdict(measured(work, run_dir))))


def run(work: PPOWork, folder: Path) -> Path:
    """Train on one rank per thread; returns the run's folder."""
    from prefect_rlhf.flows.commands import cli

    parameters = folder / "parameters.json"
    parameters.write_text(json.dumps(flow_parameters(work, folder)))
    status = cli.main(["ppo", "--parameters", str(parameters), "--devices", str(work.threads)])
    if status:
        sys.exit(status)
    return (folder / "latest").resolve()


def flow_parameters(work: PPOWork, folder: Path) -> dict[str, Any]:
    """One step more than is measured; evaluation only before the first and after the last."""
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
    """Medians over the steps after the first, by the controller's clock."""
    steps = [step for step in read_lines(run_dir / "metrics.jsonl") if 1 <= step["step"] <= work.steps]
    task_runs = [run for run in read_lines(run_dir / "task_runs.jsonl") if 1 <= run["step"] <= work.steps]
    calls = {run["call"] or run["kind"] for run in task_runs}
    return Measured(
        seconds_per_step=median(step["seconds"] for step in steps),
        seconds_per_call={call: seconds_of(call, task_runs, work.steps) for call in sorted(calls)},
        details={
            share: round(median(s[share] for s in steps), 4) for share in ("orchestration_share", "fingerprint_share")
        },
    )


def seconds_of(call: str, task_runs: Iterable[Mapping[str, Any]], steps: int) -> float:
    """Mean seconds a step in a call and the transfers that feed it."""
    return sum(run["end"] - run["start"] for run in task_runs if (run["call"] or run["kind"]) == call) / steps


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The values of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    main()
