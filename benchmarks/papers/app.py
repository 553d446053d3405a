"""Adaptive Placement and Parallelism (Xiao et al. 2023, arXiv:2312.11819), tables I and II: its two strategies.

The paper takes the largest batch that fits; here it is 8 rows for each device, in one optimizer step, and training
recomputes activations. Flattening is counted as the paper's baseline runs it from 33B on, with ZeRO 3 over all devices
in every call, generation included (DeepSpeed-Chat), and as this planner would run it, in the best strategies.
"""

from __future__ import annotations

from benchmarks.papers.case import Case
from benchmarks.papers.checks import Check, Comparison, format_seconds
from prefect_rlhf.placement.cost.datasheets.collectives import share_seconds
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.execution import Execution
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import CallWork, Workload
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.models.engine_constants import GRADIENT_BYTES
from prefect_rlhf.placement.plans.presets import PRESETS, preset_named

HARDWARE = Hardware(DATASHEETS["a100-80"], 8, NETWORKS["infiniband-800"])
WORKLOAD = Workload.fixed(256, 256, cuda_graphs=False)
ROWS_PER_DEVICE = 8
RATIOS = (0.25, 0.375, 0.5, 0.75)  # of the devices, for generation and inference: the paper's planner tries ratios, too


def interleaving(model: str, nodes: int) -> Comparison:
    """Table I: the reference model on one half, the reward model on the other."""
    case = same_size_case(model, nodes)
    plans = {name: case.preset(PRESETS[name]) for name in ("flattening", "interleaving")}
    seconds = {name: plan and plan.seconds for name, plan in plans.items()}
    flat, ours = seconds["flattening"], seconds["interleaving"]
    check = Check(
        f"APP, table I: {model} on {case.num_devices} devices",
        "interleaving is at least as fast as flattening",
        seconds,
        flat is not None and ours is not None and ours <= flat,
    )
    cells = {name: format_seconds(value) for name, value in seconds.items()}
    row = {"model": model, "devices": str(case.num_devices), **cells}
    return Comparison("APP, table I: interleaving", [row], [check])


def separation(nodes: int) -> Comparison:
    """Table II: generation and inference apart from training, one step ahead of it."""
    rows, gains = [], {}
    for model in ("llama-33b", "llama-65b"):
        case = same_size_case(model, nodes)
        zero, flat = zero_3_seconds(case), case.preset(PRESETS["flattening"])
        ahead = same_size_case(model, nodes, staleness=1)
        plans = (ahead.preset(preset_named(f"separation:{ratio}")) for ratio in RATIOS)
        best = min((plan.seconds for plan in plans if plan is not None), default=None)
        gains[model] = None if best is None else zero / best
        rows.append(
            {
                "model": model,
                "devices": str(ahead.num_devices),
                "flattening, ZeRO 3": format_seconds(zero),
                "flattening": format_seconds(flat and flat.seconds),
                "separation": format_seconds(best),
                "against ZeRO 3": "-" if best is None else f"{zero / best:.1f}x",
            }
        )
    where = f"APP, table II: {8 * nodes} devices"
    checks = [
        Check(f"{where}, {model}", "separation is faster", {model: gain}, gain > 1)
        for model, gain in gains.items()
        if gain is not None
    ]
    return Comparison("APP, table II: separation", rows, checks)


def zero_3_seconds(case: Case) -> float:
    """DeepSpeed-Chat as the paper describes it: call after call on all devices, weights gathered for every pass.

    A train_step of one micro-batch gathers them for its forward, again where that is run again, and for its backward;
    it sums gradients, each device its share, and no device has others' new weights to send (ZeRO, section 7.2.2).
    """
    graph, mesh, links = case.graph(), case.cluster.whole, case.hardware.links()
    execution = Execution(Strategy(case.num_devices), case.num_nodes, case.hardware.devices_per_node, recompute="all")
    passes = {"generate": 1 + case.workload.responses.mean, "inference": 1, "train_step": 3}
    seconds = 0.0
    for call in graph:
        if call.role is None:
            continue
        sizes = ModelSizes.of(graph.model(call.role))
        gathered = share_seconds(sizes.num_parameters * sizes.item, execution.dp_group(), links)
        sums = 1 if call.kind == "train_step" else 0
        summed = sums * share_seconds(sizes.num_parameters * GRADIENT_BYTES, execution.dp_group(), links)
        plain = case.sources.call_cost(CallWork.of(call, case.workload), execution, sizes, mesh)
        seconds += plain._replace(dp_communication=summed + passes[call.kind] * gathered).total
    return seconds


def same_size_case(model: str, nodes: int, staleness: int = 0) -> Case:
    """PPO with four models of one size."""
    rows = 8 * nodes * ROWS_PER_DEVICE
    return Case("PPO", model, model, nodes, HARDWARE, rows, WORKLOAD, staleness=staleness, recompute="all")
