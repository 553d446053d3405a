"""Certified and measured device bytes of one PPO run under many plans; prints JSON as its last line.

    python -m benchmarks.parts.certify_memory [--plans N] [--families N]

Real Prefect, gang, Megatron-core and vLLM on CPU ranks, tiny models: four ranks in float32 under many plans, and every
family on one rank in bfloat16, with checkpoints, evaluations and offloads in every step. For each plan and rank `ratio`
is the most that the certificate lets instances keep on the rank's device over the most storage bytes that the rank
reports: never less than 1, and mostly at most 1.15. `beyond_tolerance` names the others. There the certificate counts
an offload that may still run beside the next call, as some order of the nodes has it, and in this run it had ended
(`tests/placement/memory/test_certificate.py` plays such an order). `active_bytes` is what the certificate adds for the
node with the highest peak. The witness is `beyond_bytes`: how far the process's own resident memory grew past its
reported bytes from the first task run on; with models this small that is mostly Python, allocators and, with offloads,
the copies in host memory. Active bytes are held against every allocation of torch in
`tests/engines/test_allocated_bytes.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.testing.utilities import prefect_test_harness

from benchmarks.planner.prepared_ppo import prepared_ppo
from prefect_rlhf.placement.memory.certificate import Certificate
from tests.support import plan_matrix
from tests.support.plan_matrix import FOUR_RANKS
from tests.support.runs import Compact, leased, plan_file
from tests.tasks.small_tokenizer import save_letter_tokenizer

TOLERANCE = 1.15
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
WITH_COPIES = {
    "vllm generates": plan_matrix.TAKING_TURNS,
    "megatron generates": plan_matrix.plan(
        "0 engine=megatron offload=all",
        "0 offload=all",
        "0 offload=all",
        "0 offload=optimizer",
        "0 offload=all",
        "0 offload=optimizer",
    ),
}
"""On one device, with all models in host memory between their uses, the critic's weights apart."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run whose reports are compared with its certificate."""

    name: str
    parameters: Mapping[str, Any]
    plan: Compact
    num_devices: int


def main() -> None:
    """Certify, run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=len(FOUR_RANKS), help="how many of the plans of four ranks")
    parser.add_argument("--families", type=int, default=len(FAMILIES), help="how many of the families")
    asked = parser.parse_args()
    for name, count, most in (("plans", asked.plans, len(FOUR_RANKS)), ("families", asked.families, len(FAMILIES))):
        if not 0 <= count <= most:
            sys.exit(f"--{name}: got {count}, expected 0 to {most}")
    if not asked.plans + asked.families:
        sys.exit("--plans: got 0, expected 1 or more without families")
    rows: list[dict[str, Any]] = []
    with prefect_test_harness(server_startup_timeout=120), tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), asked.plans, asked.families):
            file = plan_file(case.plan, Path(folder) / "plan.json")
            with leased(case.num_devices):
                certificate = prepared_ppo({**case.parameters, "plan": str(file)}).chosen.certificate
            spans = plan_matrix.run(case.parameters, file, case.name, case.num_devices).spans
            found = rank_rows(case.name, certificate, spans)
            print(json.dumps(found), flush=True)
            rows += found
    ratios = [row["ratio"] for row in rows]
    result = {
        "num_plans": len({row["plan"] for row in rows}),
        "num_ranks": len(rows),
        "min_ratio": min(ratios),
        "max_ratio": max(ratios),
        "never_under": all(row["measured_bytes"] <= row["predicted_bytes"] for row in rows),
        "beyond_tolerance": sorted({row["plan"] for row in rows if row["ratio"] > TOLERANCE}),
    }
    print(json.dumps(result))


def cases(folder: Path, num_plans: int, num_families: int) -> Iterator[Case]:
    """Yield plans of four ranks in float32; then each family on one device in bfloat16, under both engines.

    The families' runs have reports of every kind while calls run: of checkpoints, evaluations, reloads and offloads.
    """
    given = plan_matrix.parameters(folder / "four")
    for name, compact in list(FOUR_RANKS.items())[:num_plans]:
        yield Case(name, given, compact, 4)
    for family in FAMILIES[:num_families]:
        given = plan_matrix.parameters(folder / family, family=family, kv_heads=2)
        for role in ("critic", "reward") if family == "qwen2" else ():
            save_letter_tokenizer(folder / family / role)  # as its actor has
        given |= {role: given[role] | {"dtype": "bfloat16"} for role in ("actor", "ref", "critic", "reward")}
        given |= {"algo": given["algo"] | {"evaluate_every": 1}, "checkpoint_every": 1}
        for name, compact in WITH_COPIES.items():
            yield Case(f"{family}, {name}", given, compact, 1)


def rank_rows(plan: str, certificate: Certificate, spans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row per rank; rank r is the r-th device."""
    rows = []
    for rank, ((device, predicted), peak) in enumerate(zip(certificate.most_resident, certificate.peaks, strict=True)):
        reports = [span for span in spans if str(rank) in span["device_bytes"]]
        measured = max(span["device_bytes"][str(rank)] for span in reports)
        beyond = [span["resident_bytes"][str(rank)] - span["device_bytes"][str(rank)] for span in reports]
        rows.append(
            {
                "plan": plan,
                "device": device,
                "predicted_bytes": predicted,
                "measured_bytes": measured,
                "ratio": round(predicted / measured, 4),
                "active_bytes": sum(share.num_bytes for share in peak.shares if share.passing),
                "beyond_bytes": max(beyond) - beyond[0],
            }
        )
    return rows


if __name__ == "__main__":
    main()
