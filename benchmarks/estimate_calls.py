"""Predicted beside published seconds of model function calls.

    python benchmarks/estimate_calls.py tests/placement/data/real_ppo_7b_7b.json

The table also has generation without CUDA graphs, where the file does. The last line is JSON: `calls` in the file's
order and `end_to_end`, each with predicted_seconds, measured_seconds and their ratio (null where nothing was measured).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.published import Estimate, Published, estimate_calls, estimate_end_to_end, read_published
from prefect_rlhf.placement.errors import InvalidInput


def main() -> int:
    """Print a table and the JSON line; a malformed file is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="published measurements, in the format of real_ppo_7b_7b.json")
    parser.add_argument("--explain", action="store_true", help="show what each call's time consists of")
    options = parser.parse_args()
    try:
        published = read_published(options.file)
        calls, ends = estimates(published)
        eager = without_graphs(published)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    for estimate in (*calls, *eager, *ends):
        print(line(estimate, options.explain))
    print(json.dumps({"calls": [as_json(call) for call in calls], "end_to_end": [as_json(end) for end in ends]}))
    return 0


def estimates(published: Published) -> tuple[list[Estimate], list[Estimate]]:
    """Estimate every call in the file's order, and every plan end to end."""
    by_plan = {plan: estimate_calls(published, plan) for plan in published.plans}
    ends = [estimate_end_to_end(published, plan, calls) for plan, calls in by_plan.items()]
    return [call for calls in by_plan.values() for call in calls], ends


def without_graphs(published: Published) -> list[Estimate]:
    """Estimate the calls whose time without CUDA graphs the file has apart from its plans."""
    return [
        replace(call, name=f"{call.name} (eager)", measured_seconds=measured[call.name])
        for plan, measured in published.without_cuda_graph.items()
        if plan in published.plans
        for call in estimate_calls(published, plan, cuda_graphs=False)
        if call.name in measured
    ]


def line(estimate: Estimate, explain: bool) -> str:
    """One row of the table."""
    measured = "      -" if estimate.measured_seconds is None else f"{estimate.measured_seconds:7.1f}"
    ratio = "    -" if estimate.ratio is None else f"{estimate.ratio:5.2f}"
    call = f"{estimate.plan:<12} {estimate.name:<22}"
    row = f"{call} {estimate.predicted_seconds:7.1f} s, measured {measured}, ratio {ratio}"
    terms = ", ".join(f"{name} {seconds:.2f}" for name, seconds in estimate.terms.by_term().items())
    return f"{row}  {terms}" if explain and terms else row


def as_json(estimate: Estimate) -> dict[str, str | float | None]:
    """One entry of the JSON line."""
    return {
        "plan": estimate.plan,
        "name": estimate.name,
        "predicted_seconds": estimate.predicted_seconds,
        "measured_seconds": estimate.measured_seconds,
        "ratio": estimate.ratio,
    }


if __name__ == "__main__":
    raise SystemExit(main())
