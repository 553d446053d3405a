"""Whole runs of PPO on GPUs, under plans that use every part: tiny models, real Prefect, gang and engines."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from benchmarks.gpu.commands import STEPS_OF_COMMANDS, command, memory_of
from benchmarks.gpu.step import Constant, Expected, Found, Machine, Need, Step
from prefect_rlhf.placement.devices.lease import ENVIRONMENT_VARIABLE, Lease
from prefect_rlhf.placement.memory.overhead import GRAPH_BYTES_A_LAYER

ONE, TURNS = "one device", "taking turns"
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
    from tests.support import plan_matrix
    from tests.support.runs import Result, completed, loss_difference, plan_file, weight_difference

    one_device = {ONE: plan_matrix.ONE, TURNS: plan_matrix.TAKING_TURNS}
    plans = {**one_device, "tp4 again": plan_matrix.FOUR_RANKS["tp4"], "two engines": two_engines()}
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
    found["certified_and_allocated"] = memory_of(run_dir)
    first = machine.folder.parent / _step_name(ONE) / "run.txt"
    if name != ONE and first.is_file():
        alone = Result.read(type(run_dir)(first.read_text()))
        found["loss_difference"] = loss_difference(alone, result)
        found["weight_difference"] = weight_difference(alone, result)
    return found


def two_engines() -> dict[str, str]:
    """Return a plan in which a rank generates with an engine of tp2, and evaluates with another of tp4."""
    from tests.support.plan_matrix import FOUR_RANKS

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


def profile(machine: Machine) -> Found:
    """The profile of two GPUs, which times NCCL's collectives and decoding."""
    model = machine.folder / "model"
    from tests.support.tiny import make_model

    make_model(model, layers=4, hidden=512, heads=8)
    devices = str(min(2, machine.num_gpus))
    return command(machine, "profile", "--model", str(model), "--devices", devices, "--kind", "cuda")


def _step_name(plan: str) -> str:
    return f"ppo {plan}".replace(" ", "_").replace(",", "")


_NEEDS = frozenset[Need]({"hardware", "vllm"})
_SEVERAL = _NEEDS | {"several"}
_AS_ALONE = {"loss_difference": Expected(0, 1e-3), "weight_difference": Expected(0, 5e-3)}
_GRAPHS = Constant("GRAPH_BYTES_A_LAYER", "placement/memory/overhead.py", GRAPH_BYTES_A_LAYER, "graph_bytes_a_layer")
_GRAPH_BYTES = Step(
    "graph_bytes",
    7,
    180,
    graph_bytes,
    {"graph_mib_a_layer": Expected(5, 32)},
    needs=_NEEDS,
    findings="D2",
    constants=(_GRAPHS,),
)


def _ppo(name: str, command: int, limit_seconds: int, findings: str, needs: frozenset[Need]) -> Step:
    expects = {} if name == ONE else _AS_ALONE
    return Step(_step_name(name), command, limit_seconds, partial(run_of_ppo, name=name), expects, needs, findings)


STEPS_OF_A_GPU = (_GRAPH_BYTES, _ppo(ONE, 9, 300, "N1, N6", _NEEDS), _ppo(TURNS, 9, 300, "A4, A5, B3", _NEEDS))
STEPS_OF_RUNS = (
    *(replace(step, command=0) for step in (*STEPS_OF_COMMANDS, _GRAPH_BYTES)),
    *(_ppo(name, 0, 480, findings, _SEVERAL) for name, findings in {ONE: "N1, N6", **FINDINGS}.items()),
    Step("profile", 0, 500, profile, {"status": Expected(0, 0)}, needs=_SEVERAL, findings="A6, D9"),
)
