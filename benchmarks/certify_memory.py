"""Certified and measured device bytes of one PPO run under many plans; prints JSON as its last line.

    python -m benchmarks.certify_memory [--plans N]

Real Prefect, gang, Megatron-core and vLLM on four CPU ranks, tiny models. For each plan and rank `ratio` is the most
that the certificate lets instances keep on the rank's device over the most storage bytes that the rank reports: 1 or
more, and at most 1.15. `active_bytes` is what the certificate adds for the node with the highest peak. The witness is
`beyond_bytes`: how far the process's own resident memory grew past its reported bytes from the first task run on; with
models this small that is mostly Python, allocators and, with offloads, the copies in host memory. Active bytes are held
against every allocation of torch in `tests/engines/test_allocated_bytes.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect.testing.utilities import prefect_test_harness

from benchmarks.prepared_ppo import prepared_ppo
from prefect_rlhf.placement.memory.certificate import Certificate
from tests import plan_matrix
from tests.plan_matrix import FOUR_RANKS
from tests.runs import leased, plan_file

NUM_DEVICES = 4
TOLERANCE = 1.15


def main() -> None:
    """Certify, run, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=len(FOUR_RANKS), help="how many of the plans")
    num_plans = parser.parse_args().plans
    if not 1 <= num_plans <= len(FOUR_RANKS):
        sys.exit(f"--plans: got {num_plans}, expected 1 to {len(FOUR_RANKS)}")
    rows: list[dict[str, Any]] = []
    with prefect_test_harness(server_startup_timeout=120), tempfile.TemporaryDirectory() as folder:
        parameters = plan_matrix.parameters(Path(folder))
        for name, compact in list(FOUR_RANKS.items())[:num_plans]:
            file = plan_file(compact, Path(folder) / "plan.json")
            with leased(NUM_DEVICES):
                certificate = prepared_ppo({**parameters, "plan": str(file)}).chosen.certificate
            spans = plan_matrix.run(parameters, file, name, NUM_DEVICES).spans
            rows += rank_rows(name, certificate, spans)
            print(json.dumps(rows[-NUM_DEVICES:]), flush=True)
    ratios = [row["ratio"] for row in rows]
    result = {
        "num_plans": num_plans,
        "num_ranks": len(rows),
        "min_ratio": min(ratios),
        "max_ratio": max(ratios),
        "never_under": min(ratios) >= 1,
        "within_tolerance": max(ratios) <= TOLERANCE,
    }
    print(json.dumps(result))


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
