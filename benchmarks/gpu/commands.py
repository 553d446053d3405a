"""What a user types, on one GPU and a tiny model: the doctor, runs of GRPO, a kill and a resume, a flow on a pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.step import Expected, Found, Machine, Need, Step
from benchmarks.one_card.guard import kill_tree

STEPS = 3
STEPS_OF_KILLED = 12
"""So many that a kill after the second comes before the last."""
REWARD = """def even(completions, **_):
    return [float(len(each) % 2) for each in completions]
"""
NO_BASE = {"adapter": {"rank": 8}}
FOUR_BITS = {**NO_BASE, "base_dtype": "nf4"}
FLOW = """import os
import torch
from prefect import flow


@flow
def seen():
    devices = os.environ["GPU_MESH_DEVICES"], os.environ["CUDA_VISIBLE_DEVICES"]
    with open("seen.txt", "w") as file:
        print(*devices, torch.ones(3, device="{device}").sum().item(), file=file)
"""
POOL = "first-morning"


def doctor(machine: Machine) -> Found:
    """The host's own check."""
    return command(machine, "doctor", "--kind", machine.pick("cuda", "cpu"))


def run_of_grpo(machine: Machine, actor: Mapping[str, Any] | None = None) -> Found:
    """Three steps of GRPO of a tiny model, by the command line and without network; memory beside the certificate."""
    write_parameters(machine.folder, actor or {}, steps=STEPS)
    found = command(machine, *run_words(machine))
    for run in _runs(machine.folder):
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found["num_steps"] = len(steps)
        found["step_seconds"] = [step.get("seconds") for step in steps]
        found["certified_and_allocated"] = memory_of(run)
    return found


def killed_and_resumed(machine: Machine) -> Found:
    """A run that is killed with all its processes after two steps, and its resume, against the run without a kill."""
    from tests.support.runs import Result, loss_difference, weight_difference

    ways = {name: machine.folder / name for name in ("whole", "killed")}
    for folder in ways.values():
        folder.mkdir(exist_ok=True)
        write_parameters(folder, {}, steps=STEPS_OF_KILLED, checkpoint_every=1)
    found = command(machine, *run_words(machine), folder=ways["whole"])
    found["steps_at_the_kill"] = _kill_after(machine, ways["killed"], steps=2)
    command(machine, *run_words(machine), "-p", "resume_from=latest", folder=ways["killed"])
    whole, resumed = (Result.read(_runs(folder)[-1]) for folder in ways.values())
    found["equal_tokens"] = whole.tokens == resumed.tokens
    found["loss_difference"] = loss_difference(whole, resumed)
    found["weight_difference"] = weight_difference(whole, resumed)
    return found


def any_flow_on_a_pool(machine: Machine) -> Found:
    """A flow that knows nothing of this package, on a pool of this machine's first device: what it sees."""
    from prefect.settings import get_current_settings
    from prefect.testing.utilities import prefect_test_harness

    folder, kind = machine.folder, machine.pick("cuda", "cpu")
    (folder / "seen.py").write_text(FLOW.format(device=kind))
    variables = {"cluster": POOL, "devices_per_node": 1, "kind": kind, "num_devices": 1}
    pool = {"name": POOL, "job_variables": variables}
    deployment = {"name": "one", "entrypoint": "seen.py:seen", "work_pool": pool}
    (folder / "prefect.yaml").write_text(json.dumps({"name": POOL, "deployments": [deployment]}))  # JSON is YAML
    with prefect_test_harness(server_startup_timeout=120), (folder / "commands.txt").open("w") as output:
        environment = os.environ | {"PREFECT_API_URL": get_current_settings().api.url or ""}
        prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
        of_folder = partial(subprocess.run, cwd=folder, env=environment, stdout=output, stderr=output, check=True)
        of_folder([*prefect, "work-pool", "create", POOL, "--type", "gpu-mesh"])
        of_folder([*prefect, "deploy", "--all"])
        of_folder([*prefect, "deployment", "run", "seen/one"])
        of_folder([*prefect, "worker", "start", "--pool", POOL, "--run-once"])
    devices, *numbers, total = (folder / "seen.txt").read_text().split()
    return machine.found | {"devices": devices, "visible": " ".join(numbers), "sum_on_the_device": float(total)}


def write_parameters(folder: Path, actor: Mapping[str, Any], **more: Any) -> None:
    """Write the parameters of a run, with its model, prompts and reward."""
    from tests.support.tiny import make_model, make_prompts

    prompts = make_prompts(folder / "prompts.parquet")
    (folder / "rewards.py").write_text(REWARD)
    parameters = {
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "actor": {"path": make_model(folder / "actor", hidden=128, heads=4), **actor},
        "reward": {"functions": {"even": {"function": "rewards.py:even", "signature": "trl"}}},
        "output_dir": str(folder / "runs"),
        **more,
        "algo": {
            "batch_size": 4,
            "samples_per_prompt": 4,
            "sampling": {"max_new_tokens": 8},
            "evaluate_every": 1000,
            "kl": {"coefficient": 0},
        },
    }
    (folder / "parameters.yaml").write_text(json.dumps(parameters))  # JSON is YAML


def run_words(machine: Machine) -> tuple[str, ...]:
    """Return the words of a run with those parameters."""
    kind = machine.pick("cuda", "cpu")
    return ("run", "grpo", "--parameters", "parameters.yaml", "--devices", "1", "--kind", kind)


def command(machine: Machine, *words: str, folder: Path | None = None) -> Findings:
    """Run a command of the program in the step's folder, as a user would; find its seconds, status and last lines.

    Its output is in `command.txt` of the folder as it comes.
    """
    found, began, where = machine.found, time.monotonic(), folder or machine.folder
    with _started(machine, words, where) as process:
        status = process.wait()
    found["seconds_of_the_command"] = time.monotonic() - began
    found["lines"] = (where / "command.txt").read_text().splitlines()[-12:]
    found["status"] = status
    return found


def memory_of(run_dir: Path) -> Any:
    """Return the witness of memory that the run's folder holds, if this version writes it."""
    file = run_dir / "memory.json"
    return json.loads(file.read_text()) if file.is_file() else "no memory.json in the run's folder"


def _started(machine: Machine, words: tuple[str, ...], folder: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PREFECT_HOME": str(machine.folder / "prefect"), "HF_HUB_OFFLINE": "1"}
    with (folder / "command.txt").open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "prefect_rlhf", *words],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _kill_after(machine: Machine, folder: Path, steps: int) -> int:
    """Start a run, and kill it with all its processes once it has made so many steps; return how many it had made."""

    def made() -> int:
        return sum(len(file.read_text().splitlines()) for file in (folder / "runs").glob("*-*/metrics.jsonl"))

    with _started(machine, run_words(machine), folder) as process:
        while made() < steps and process.poll() is None:
            time.sleep(0.02)
        kill_tree(process.pid)
    return made()


def _runs(folder: Path) -> list[Path]:
    """Return the runs of a folder that made a step, the newest last."""
    runs = {file.parent.resolve() for file in (folder / "runs").glob("*/metrics.jsonl")}
    return sorted(runs, key=lambda run: (run / "run.json").stat().st_mtime)


_OK = {"status": Expected(0, 0)}
_ON_VLLM = frozenset[Need]({"vllm"})
_THREE_STEPS = _OK | {"num_steps": Expected(STEPS, STEPS)}
_RESUMED = {
    "steps_at_the_kill": Expected(2, STEPS_OF_KILLED - 1),
    "equal_tokens": Expected(1, 1, "yes"),
    "loss_difference": Expected(0, 1e-3),
    "weight_difference": Expected(0, 5e-3),
}
STEPS_OF_COMMANDS = (
    Step("doctor", 7, 120, doctor, _OK, findings="N1, N11, N16"),
    Step("run_of_grpo", 7, 240, run_of_grpo, _THREE_STEPS, needs=_ON_VLLM, findings="N1, N6, B2"),
    Step("run_with_an_adapter", 8, 110, partial(run_of_grpo, actor=NO_BASE), _THREE_STEPS, needs=_ON_VLLM),
    Step("run_in_four_bits", 8, 110, partial(run_of_grpo, actor=FOUR_BITS), _THREE_STEPS),
    Step("killed_and_resumed", 8, 280, killed_and_resumed, _OK | _RESUMED, needs=_ON_VLLM, findings="B4"),
    Step("any_flow_on_a_pool", 8, 100, any_flow_on_a_pool, {"sum_on_the_device": Expected(3, 3)}),
)
