"""Whole runs of PPO on several GPUs, under plans that use every part: tiny models, real Prefect, gang and engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.step import Constant, Expected, Found, Machine, Need, Step
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.memory.overhead import GRAPH_BYTES_A_LAYER

ONE = "one device"
REWARD = """def even(completions, **_):
    return [float(len(each) % 2) for each in completions]
"""
FINDINGS = {
    "dp4": "A1",
    "tp4": "A2, A3, N4",
    "tp4 again": "A2: it loads compiled artefacts of the run before",
    "tp2 pp2": "A3: the engine that generates has its ranks in the order 0, 2, 1, 3",
    "pp4": "C9",
    "split": "A1: each call uses a part of the devices",
    "offload": "A4, A5, B3",
    "all of it offloaded": "A4, A5",
    "two engines": "A4, N4: a rank has engines of tp2 and of tp4",
    "pipeline generates": "C1",
}


def run_of_ppo(machine: Machine, name: str) -> Found:
    """Two steps of PPO under a plan; losses and weights against the run on one device, if it went before."""
    from prefect.testing.utilities import prefect_test_harness

    from prefect_rlhf.blocks.cluster import Cluster
    from prefect_rlhf.flows.ppo import ppo
    from tests import plan_matrix
    from tests.runs import Result, completed, loss_difference, plan_file, weight_difference

    plans = {ONE: plan_matrix.ONE, "tp4 again": plan_matrix.FOUR_RANKS["tp4"], "two engines": two_engines()}
    plan = plan_file({**plan_matrix.FOUR_RANKS, **plans}[name], machine.folder / "plan.json")
    cluster = Cluster(cluster="morning", devices_per_node=machine.num_gpus, kind="cuda").shape
    lease = Lease("morning", "morning", cluster, cluster.whole, cluster.whole.devices(), "cuda")
    os.environ[ENVIRONMENT_VARIABLE] = lease.to_json()
    given = plan_matrix.parameters(machine.folder) | {"plan": str(plan)}
    with prefect_test_harness(server_startup_timeout=120):
        run_dir = completed(ppo, given)
    (machine.folder / "run.txt").write_text(str(run_dir))
    result = Result.read(run_dir)
    found = machine.found
    found.update({"seconds": [step["seconds"] for step in result.metrics], "loss": result.metrics[-1]})
    found["certified_and_allocated"] = _memory(run_dir)
    first = machine.folder.parent / _step_name(ONE) / "run.txt"
    if name != ONE and first.is_file():
        alone = Result.read(type(run_dir)(first.read_text()))
        found["loss_difference"] = loss_difference(alone, result)
        found["weight_difference"] = weight_difference(alone, result)
    return found


def two_engines() -> dict[str, str]:
    """Return a plan in which a rank generates with an engine of tp2, and evaluates with another of tp4."""
    from tests.plan_matrix import FOUR_RANKS

    return {**FOUR_RANKS["dp2 tp2, micro-batches"], "actor_evaluation": "0-3 tp4 engine=vllm"}


def graph_bytes(machine: Machine) -> Found:
    """Memory that vLLM's captured graphs take: an engine with graphs less an engine without, by layer."""
    import torch

    from prefect_rlhf.engines.commands import BuildCommand
    from prefect_rlhf.engines.vllm.engine import VllmEngine
    from prefect_rlhf.placement.devices.mesh import DeviceMesh
    from prefect_rlhf.placement.devices.strategy import Strategy
    from prefect_rlhf.placement.layout.layout import layout_of
    from prefect_rlhf.placement.plan import ModelInstance
    from tests.engines.megatron_cases import Case, make_folder

    layers = 16
    sizes = {"layers": layers, "hidden": 1024, "heads": 16, "kv_heads": 4, "vocab": 32000}
    spec = Case(make_folder(machine.folder / "lm", **sizes), dtype="bfloat16").spec()
    mesh = DeviceMesh(0, 1, 0, 1)
    instance = ModelInstance("actor", "vllm", mesh, Strategy())
    free, kept = [torch.cuda.mem_get_info()[0]], []
    for graphs in (False, True):
        command = BuildCommand(spec, instance, (0,), layout_of(instance, spec, mesh), 128, 256, cuda_graphs=graphs)
        kept.append(VllmEngine(command, 0))  # both stay, so that a difference is an engine
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    taken = (free[1] - free[2]) - (free[0] - free[1])
    return {"graph_bytes_a_layer": taken / layers, "graph_mib_a_layer": taken / layers / (1 << 20)}


def doctor(machine: Machine) -> Found:
    """The host's own check."""
    return _command(machine, "doctor", "--kind", machine.pick("cuda", "cpu"))


def run_of_grpo(machine: Machine) -> Found:
    """Three steps of GRPO of a tiny model, by the command line and without network; memory beside the certificate."""
    from tests.tiny import make_model, make_prompts

    folder = machine.folder
    prompts = make_prompts(folder / "prompts.parquet")
    (folder / "rewards.py").write_text(REWARD)
    parameters = {
        "prompts": {"path": prompts},
        "held_out": {"path": prompts, "split": "held_out"},
        "actor": {"path": make_model(folder / "actor")},
        "reward": {"functions": {"even": {"function": "rewards.py:even", "signature": "trl"}}},
        "output_dir": str(folder / "runs"),
        "steps": 3,
        "algo": {
            "batch_size": 4,
            "samples_per_prompt": 4,
            "sampling": {"max_new_tokens": 8},
            "evaluate_every": 1000,
            "kl": {"coefficient": 0},
        },
    }
    (folder / "parameters.yaml").write_text(json.dumps(parameters))  # JSON is YAML
    words = ("run", "grpo", "--parameters", "parameters.yaml", "--devices", "1", "--kind", machine.pick("cuda", "cpu"))
    found = _command(machine, *words)
    for run in sorted(path.parent for path in (folder / "runs").glob("*/metrics.jsonl"))[-1:]:
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found["num_steps"] = len(steps)
        found["step_seconds"] = [step.get("seconds") for step in steps]
        found["certified_and_allocated"] = _memory(run)
    return found


def profile(machine: Machine) -> Found:
    """The profile of two GPUs, which times NCCL's collectives and decoding."""
    model = machine.folder / "model"
    from tests.tiny import make_model

    make_model(model, layers=4, hidden=512, heads=8)
    devices = str(min(2, machine.num_gpus))
    return _command(machine, "profile", "--model", str(model), "--devices", devices, "--kind", "cuda")


def _command(machine: Machine, *words: str) -> Findings:
    """Run a command of the program in the step's folder, as a user would; find its seconds, status and last lines.

    Its output is in `command.txt` of the folder as it comes.
    """
    found, file, began = machine.found, machine.folder / "command.txt", time.monotonic()
    environment = os.environ | {"PREFECT_HOME": str(machine.folder / "prefect"), "HF_HUB_OFFLINE": "1"}
    with file.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "prefect_rlhf", *words],
            cwd=machine.folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    found["seconds_of_the_command"] = time.monotonic() - began
    found["lines"] = file.read_text().splitlines()[-12:]
    found["status"] = ended.returncode
    return found


def _memory(run_dir: Any) -> Any:
    """Return the witness of memory that the run's folder holds, if this version writes it."""
    file = run_dir / "memory.json"
    return json.loads(file.read_text()) if file.is_file() else "no memory.json in the run's folder"


def _step_name(plan: str) -> str:
    return f"ppo {plan}".replace(" ", "_").replace(",", "")


_NEEDS = frozenset({"hardware", "several", "vllm"})
_OK = {"status": Expected(0, 0)}
_GRAPHS = Constant("GRAPH_BYTES_A_LAYER", "placement/memory/overhead.py", GRAPH_BYTES_A_LAYER, "graph_bytes_a_layer")
_ON_VLLM = frozenset[Need]({"hardware", "vllm"})


def _of_one_gpu(command: int) -> tuple[Step, ...]:
    """Return the steps of runs that a single GPU can take."""
    return (
        Step("doctor", command, 120, doctor, _OK, findings="N1, N11, N16"),
        Step(
            "run_of_grpo",
            command,
            240,
            run_of_grpo,
            _OK | {"num_steps": Expected(3, 3)},
            needs=frozenset({"vllm"}),
            findings="N1, N6, B2",
        ),
        Step(
            "graph_bytes",
            command,
            180,
            graph_bytes,
            {"graph_mib_a_layer": Expected(5, 32)},
            needs=_ON_VLLM,
            findings="D2",
            constants=(_GRAPHS,),
        ),
    )


STEPS_OF_A_RUN = _of_one_gpu(7)
STEPS_OF_RUNS = (
    *_of_one_gpu(0),
    *(
        Step(
            _step_name(name),
            0,
            480,
            partial(run_of_ppo, name=name),
            {} if name == ONE else {"loss_difference": Expected(0, 1e-3), "weight_difference": Expected(0, 5e-3)},
            needs=_NEEDS,
            findings=findings,
        )
        for name, findings in {ONE: "N1, N6", **FINDINGS}.items()
    ),
    Step("profile", 0, 500, profile, {"status": Expected(0, 0)}, needs=_NEEDS, findings="A6, D9"),
)
