"""Predicted beside published seconds of model function calls.

    python -m benchmarks.papers.estimate_calls tests/placement/data/real_ppo_7b_7b.json
    python -m benchmarks.papers.estimate_calls --megatron

The constants were set on the first; the second is a table that set none (`paper_megatron.py`).
The table also has generation without CUDA graphs, where the file does. The last line is JSON: `calls` in the file's
order and `end_to_end`, each with predicted_seconds, measured_seconds and their ratio (null where nothing was measured).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.papers.megatron import TABLE as MEGATRON
from benchmarks.papers.published import Estimate, Published, estimate_calls, estimate_end_to_end, read_published
from prefect_rlhf.errors.errors import InvalidInput


def main() -> int:
    """Print a table and the JSON line; a malformed file is one line on standard error and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="published measurements, as in real_ppo_7b_7b.json")
    parser.add_argument("--megatron", action="store_true", help="training of GPT by Megatron-LM, in place of a file")
    parser.add_argument("--explain", action="store_true", help="show what each call's time consists of")
    options = parser.parse_args()
    if options.megatron == (options.file is not None):
        parser.error("a file of published measurements, or --megatron")
    try:
        calls, eager, ends = (megatron(), [], []) if options.megatron else of_file(options.file)
    except InvalidInput as error:
        print(error, file=sys.stderr)
        return 2
    for estimate in (*calls, *eager, *ends):
        print(line(estimate, options.explain))
    if errors := [abs(call.ratio - 1) for call in calls if call.ratio is not None]:
        print(f"calls: error {median(errors):.1%} in the median, {max(errors):.1%} at most")
    print(json.dumps({"calls": [as_json(call) for call in calls], "end_to_end": [as_json(end) for end in ends]}))
    return 0


def of_file(file: Path) -> tuple[list[Estimate], list[Estimate], list[Estimate]]:
    """Estimate the calls of a file, those of which it has the time without CUDA graphs, and its plans end to end."""
    published = read_published(file)
    calls, ends = estimates(published)
    return calls, without_graphs(published), ends


def megatron() -> list[Estimate]:
    """Estimate the iterations of Megatron's table."""
    return [
        Estimate("megatron", f"{row.layers} layers of {row.hidden}", cost, cost.total, row.measured_seconds)
        for row in MEGATRON
        for cost in [row.predicted()]
    ]


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
