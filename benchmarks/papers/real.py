"""ReaL (Mei et al. 2024, arXiv:2406.14088), figures 7, 8 and 16: gain of the searched plan over ReaL-Heuristic.

Calls are counted as ReaL's engine runs them (`RealExecution`, full recomputation). A length that grows is the
response's: prompts stay at 1024 tokens. The heuristic has one strategy for all calls (section 8.1), and as in
pre-training its micro-batches have one size, that of table 5.
"""

from __future__ import annotations

from benchmarks.papers.case import Case
from benchmarks.papers.checks import Check, Comparison, Row, format_seconds
from benchmarks.papers.engines import RealExecution
from benchmarks.papers.plans import TimedPlan
from prefect_rlhf.placement.cost.datasheets.hardware import NETWORKS, Hardware
from prefect_rlhf.placement.cost.datasheets.kinds import DATASHEETS
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.plans.presets import PRESETS

HARDWARE = Hardware(DATASHEETS["h100"], 8, NETWORKS["roce-3200"])
HEURISTIC = PRESETS["real-heuristic"]
SIZES = {"7b": (2, 512), "13b": (4, 1024), "34b": (8, 2048), "70b": (16, 4096)}
"""Nodes and batch of the weak-scaling experiments (appendix A); critic and reward model are of 7B."""
CONTEXTS = (2048, 4096, 8192)
PROMPT = 1024
ALGORITHMS = {"DPO": 1, "GRPO": 8, "ReMax": 1}
"""Optimizer steps of a batch; the paper says so of PPO only (8)."""


def weak_scaling(size: str, context: int) -> Case:
    """Figures 7 and 8: as many tokens at every context."""
    nodes, batch = SIZES[size]
    return _case("PPO", size, nodes, batch * CONTEXTS[0] // context, context, 8)


def beyond_ppo(algorithm: str) -> Case:
    """Figure 16: a 70B actor and a 7B critic on 16 nodes."""
    return _case(algorithm, "70b", 16, 512, CONTEXTS[0], ALGORITHMS[algorithm])


def heuristic(case: Case) -> TimedPlan | None:
    """Return the preset's plan: one strategy, and micro-batches of at most so many tokens; more where none fits."""
    return case.preset(HEURISTIC)


def contexts(size: str) -> Comparison:
    """Figure 8: one size, all contexts."""
    compared = {context: _gain(weak_scaling(size, context)) for context in CONTEXTS}
    gains = {str(context): gain for context, (_, gain) in compared.items()}
    first, last = gains[str(CONTEXTS[0])], gains[str(CONTEXTS[-1])]
    check = Check(
        f"ReaL, figure 8: {size}",
        f"the gain at {CONTEXTS[-1]} tokens is above that at {CONTEXTS[0]}",
        gains,
        first is not None and last is not None and first < last,
    )
    rows = [{"actor": size, "context": str(context), **row} for context, (row, _) in compared.items()]
    return Comparison(f"ReaL, figures 7 and 8: PPO, {size}", rows, [check])


def algorithms() -> Comparison:
    """Figure 16."""
    compared = {algorithm: _gain(beyond_ppo(algorithm)) for algorithm in ALGORITHMS}
    rows = [{"algorithm": algorithm, **row} for algorithm, (row, _) in compared.items()]
    gains = {algorithm: gain for algorithm, (_, gain) in compared.items()}
    known = {algorithm: gain for algorithm, gain in gains.items() if gain is not None}
    most, least = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
    whole = len(known) == len(gains)
    checks = [
        Check("ReaL, figure 16: most", "ReMax gains most", gains, whole and most == "ReMax"),
        Check("ReaL, figure 16: least", "GRPO gains least", gains, whole and least == "GRPO"),
    ]
    return Comparison("ReaL, figure 16: beyond PPO", rows, checks)


def _gain(case: Case) -> tuple[Row, float | None]:
    searched, plain = case.searched(), heuristic(case)
    row = {
        "searched": format_seconds(searched and searched.seconds),
        "heuristic": format_seconds(plain and plain.seconds),
    }
    if searched is None or plain is None:
        return {**row, "strategy": "-", "gain": "-"}, None
    gain = plain.seconds / searched.seconds - 1
    placement = next(iter(plain.placements.values()))
    strategy = f"{placement.strategy} x {placement.micro_batches}"
    return {**row, "strategy": strategy, "gain": f"{gain:.0%}"}, gain


def _case(algorithm: str, size: str, nodes: int, batch: int, context: int, mini_batches: int) -> Case:
    return Case(
        algorithm,
        actor=f"llama3-{size}",
        critic="llama3-7b",
        num_nodes=nodes,
        hardware=HARDWARE,
        batch=batch,
        workload=Workload.fixed(PROMPT, context - PROMPT),
        mini_batches=mini_batches,
        execution=RealExecution,
        recompute="all",
        engines=("megatron",),
    )
