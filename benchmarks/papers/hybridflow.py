"""HybridFlow (Sheng et al. 2024, arXiv:2409.19256), figures 12 and 15: placements, and shards for generation.

All four models of PPO have one size. Training is Megatron with sequence parallelism and recomputes activations;
generation is vLLM before 0.6 without CUDA graphs (`HybridFlowExecution`), with as many rows in flight as the plan has
memory for. 96 devices work on 1056 rows a step, the nearest to 1024 that divide over them.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.case import Case
from benchmarks.papers.checks import Check, Comparison, format_seconds
from benchmarks.papers.engines import EarlyVllmExecution, HybridFlowExecution
from prefect_rlhf.placement.cost.call import call_cost
from prefect_rlhf.placement.cost.call_bytes import static_bytes
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.times.roofline import DatasheetTimes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.known_models import known_shape
from prefect_rlhf.placement.plans.presets import PRESETS

HARDWARE = Hardware(DATASHEETS["a100-80"], 8, NETWORKS["infiniband-200"])
WORKLOAD = Workload.fixed(1024, 1024, cuda_graphs=False)
PLACEMENTS = {"colocate": "flattening", "split": "hybridflow-split", "standalone": "standalone"}
BEST = {
    "llama-13b": {16: "colocate", 32: "colocate", 64: "colocate", 96: "split", 128: "standalone"},
    "llama-34b": {32: "colocate", 64: "colocate", 96: "split", 128: "split"},
}
"""The best placement that section 8.3 reports, by model and devices."""
SHARDS = {"llama-7b": 2, "llama-13b": 4}
"""Generation's best tensor-parallel size after training with p 1, t 8, d 2 (figure 15)."""
VLLM_SHARE = 0.9  # of a device, by default


def placements(model: str, devices: int) -> Comparison:
    """Figure 12: one model on one number of devices."""
    rows = round(1024 / devices) * devices
    case = Case(
        "PPO",
        actor=model,
        critic=model,
        num_nodes=devices // 8,
        hardware=HARDWARE,
        batch=rows,
        workload=WORKLOAD,
        mini_batches=8,
        execution=HybridFlowExecution,
        recompute="all",
        engines=("vllm",),
    )
    plans = {name: case.preset(PRESETS[rule]) for name, rule in PLACEMENTS.items()}
    seconds = {name: plan and plan.seconds for name, plan in plans.items()}
    fitting = {name: value for name, value in seconds.items() if value is not None}
    best = min(fitting, key=fitting.__getitem__, default="none")
    expected = BEST[model][devices]
    check = Check(
        f"HybridFlow, figure 12: {model} on {devices} devices", f"{expected} is best", seconds, best == expected
    )
    cells = {name: format_seconds(value) for name, value in seconds.items()}
    row = {"model": model, "devices": str(devices), **cells, "best": best, "paper": expected}
    return Comparison("HybridFlow, figure 12: placements", [row], [check])


def shards(model: str) -> Comparison:
    """Figure 15: transition and generation on 16 devices that hold all four models."""
    seconds = {str(tp): _generation_seconds(model, tp) for tp in (1, 2, 4, 8)}
    best = min(seconds, key=seconds.__getitem__)
    check = Check(
        f"HybridFlow, figure 15: {model}", f"tp {SHARDS[model]} generates fastest", seconds, best == str(SHARDS[model])
    )
    cells = {f"tp {tp}": format_seconds(value) for tp, value in seconds.items()}
    row = {"model": model, **cells, "best": f"tp {best}", "paper": f"tp {SHARDS[model]}"}
    return Comparison("HybridFlow, figure 15: generation", [row], [check])


def _generation_seconds(model: str, tp: int) -> float:
    """Seconds of transition (its table 2) and generation, whose cache takes what trained and frozen models leave."""
    sizes = ModelSizes.of_shape(known_shape(model))
    times, work = DatasheetTimes.of(sizes, HARDWARE), CallWork("generate", 1024, WORKLOAD)
    training, execution = Execution(Strategy(2, 8), 2, 8), EarlyVllmExecution(Strategy(16 // tp, tp), 2, 8)
    trained, frozen = (static_bytes(training, sizes, on).static for on in (True, False))
    copy = static_bytes(execution, sizes, False).static
    room = VLLM_SHARE * HARDWARE.device.memory_bytes - 2 * trained - 2 * frozen - copy
    transition = times.links.seconds((8 - tp) / (8 * tp) * sizes.num_parameters * sizes.item, "node")
    fitting = replace(execution, cache_bytes=int(room))
    return transition + call_cost(work, fitting, times).total
