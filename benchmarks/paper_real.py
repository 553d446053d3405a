"""ReaL (Mei et al. 2024, arXiv:2406.14088), figures 7, 8 and 16: gain of the searched plan over ReaL-Heuristic.

Calls are counted as ReaL's engine runs them (`execution.REAL`, full recomputation). A length that grows is the
response's: prompts stay at 1024 tokens. The heuristic is counted twice: with every call in 4 micro-batches, as in its
table 5, and with those that suit each call best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.paper_case import Case
from benchmarks.paper_checks import Check, Comparison, Row, grows, shown
from prefect_rlhf.placement.cost.execution import REAL
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.devices import DEVICE_KINDS, NETWORKS, Hardware
from prefect_rlhf.placement.presets import PRESETS

HARDWARE = Hardware(DEVICE_KINDS["h100"], 8, NETWORKS["roce-3200"])
HEURISTIC = PRESETS["real-heuristic"]
BASELINES = {"4 micro-batches": replace(HEURISTIC, micro_batches=4), "best micro-batches": HEURISTIC}
SIZES = {"7b": (2, 512), "13b": (4, 1024), "34b": (8, 2048), "70b": (16, 4096)}
"""Nodes and batch of the weak-scaling experiments (appendix A); critic and reward model are of 7B."""
CONTEXTS = (2048, 4096, 8192)
PROMPT = 1024
ALGORITHMS = {"DPO": 1, "GRPO": 8, "ReMax": 1}
"""Optimizer steps of a batch; the paper says so of PPO only (8)."""

Gains = dict[str, float | None]


def weak_scaling(size: str, context: int) -> Case:
    """Figures 7 and 8: as many tokens at every context."""
    nodes, batch = SIZES[size]
    return _case("PPO", size, nodes, batch * CONTEXTS[0] // context, context, 8)


def beyond_ppo(algorithm: str) -> Case:
    """Figure 16: a 70B actor and a 7B critic on 16 nodes."""
    return _case(algorithm, "70b", 16, 512, CONTEXTS[0], ALGORITHMS[algorithm])


def contexts(size: str) -> Comparison:
    """Figure 8: one size, all contexts."""
    found = {context: _gains(weak_scaling(size, context)) for context in CONTEXTS}
    checks = [
        Check(
            f"ReaL, figure 8: {size}, heuristic with {baseline}",
            f"the gain at {CONTEXTS[-1]} tokens is above that at {CONTEXTS[0]}",
            {str(context): gains[baseline] for context, (_, gains) in found.items()},
            _above(found[CONTEXTS[-1]][1][baseline], found[CONTEXTS[0]][1][baseline]),
        )
        for baseline in BASELINES
    ]
    rows = [{"actor": size, "context": str(context), **row} for context, (row, _) in found.items()]
    return Comparison(f"ReaL, figures 7 and 8: PPO, {size}", rows, checks)


def algorithms() -> Comparison:
    """Figure 16."""
    found = {algorithm: _gains(beyond_ppo(algorithm)) for algorithm in ALGORITHMS}
    rows = [{"algorithm": algorithm, **row} for algorithm, (row, _) in found.items()]
    return Comparison("ReaL, figure 16: beyond PPO", rows, list(_orders({name: g for name, (_, g) in found.items()})))


def _orders(gains: dict[str, Gains]) -> Iterator[Check]:
    for baseline in BASELINES:
        values = {name: found[baseline] for name, found in gains.items()}
        known = {name: value for name, value in values.items() if value is not None}
        most, least = max(known, key=known.__getitem__), min(known, key=known.__getitem__)
        where = f"ReaL, figure 16, heuristic with {baseline}"
        yield Check(f"{where}: most", "ReMax gains most", values, most == "ReMax" and len(known) == len(values))
        yield Check(f"{where}: least", "GRPO gains least", values, least == "GRPO" and len(known) == len(values))


def _gains(case: Case) -> tuple[Row, Gains]:
    searched = case.searched()
    row = {"searched": shown(searched and searched.seconds)}
    gains: Gains = {}
    for name, rule in BASELINES.items():
        found = case.preset(rule)
        gains[name] = None if found is None or searched is None else found.seconds / searched.seconds - 1
        row[f"heuristic, {name}"] = shown(found and found.seconds)
        row[f"gain, {name}"] = "-" if gains[name] is None else f"{gains[name]:.0%}"
    return row, gains


def _above(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and grows([other, one])


def _case(algorithm: str, size: str, nodes: int, batch: int, context: int, mini_batches: int) -> Case:
    actor, workload = f"llama3-{size}", Workload.fixed(PROMPT, context - PROMPT)
    return Case(
        algorithm,
        actor,
        "llama3-7b",
        nodes,
        HARDWARE,
        batch,
        workload,
        mini_batches,
        rules=REAL,
        recompute=True,
        engines=("megatron",),
    )
