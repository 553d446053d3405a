"""Seconds of public runs beside those of the planner: how far are estimates from what others measured?

    python -m benchmarks.public_runs
    python -m benchmarks.public_runs --only nemo_rl_8b_megatron --explain
    python -m benchmarks.public_runs --fit

Each file of benchmarks/public quotes a report, with its address and settings, and has the words of `prefect-rlhf plan`
that ask for it, with the placement of the report. Half of the runs set constants of the runtime `public`
(flows/hardware/runtimes.py); the others test it. `--fit` fits again and shows what it finds. The table has the estimate
with our runtime and with `public`. ReaL's calls, on which its own runtime was set, follow. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field
from scipy.optimize import least_squares

from benchmarks.papers.published import estimate_calls, estimate_end_to_end, read_published
from benchmarks.planner.read_flags import read_flags
from prefect_rlhf.errors.table import table
from prefect_rlhf.flows.algorithm.rlhf_flow import find_flow
from prefect_rlhf.flows.commands.plan import plan, read_options
from prefect_rlhf.flows.hardware.runtimes import OURS, PUBLIC
from prefect_rlhf.flows.planning.given_plan import GivenPlan
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.placement.augmented.augment import augment
from prefect_rlhf.placement.augmented.node import subject_of
from prefect_rlhf.placement.augmented.work import ModelCall
from prefect_rlhf.placement.cost.datasheets.hardware import Efficiency
from prefect_rlhf.placement.cost.node import NodeCosts
from prefect_rlhf.placement.plan import ExecutionPlan
from prefect_rlhf.placement.planner.question import Question

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "benchmarks" / "public"
REAL = ROOT / "tests" / "placement" / "data" / "real_ppo_7b_7b.json"
SAME_REPORT = (("nemo_rl_8b_megatron", "nemo_rl_8b_dtensor"),)
"""Placements of one report, the faster first."""
PRIOR: Mapping[str, tuple[float, float]] = {
    "matmul": (OURS.efficiency.matmul, 0.2),
    "taken_layer_seconds": (0.1, 1.5),
}
"""The fitted constants before any run was seen: their value, and the standard deviation of its logarithm."""
SPREAD = 0.15
"""Standard deviation of the logarithm of a run's seconds with the right constants."""


class Report(BaseModel):
    """A public run: what was measured, where that is written, and the question that asks for it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Annotated[str, Field(pattern="^https://")]
    quote: Annotated[str, Field(min_length=20)]
    settings: str
    software: str
    assumed: str
    kind: Literal["rollouts", "training"]
    fitted: bool
    measured_seconds: Annotated[float, Field(gt=0)]
    measured_calls: Mapping[str, float] = {}
    ask: str
    plan: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """A public report, as a question for the planner and the plan that it ran."""

    name: str
    report: Report
    question: Question
    plan: ExecutionPlan

    @classmethod
    def read(cls, file: Path) -> Run:
        """Read a file of REPORTS. Its paths of models are relative to the checkout."""
        report = Report.model_validate(yaml.safe_load(file.read_text()))
        words = [word.replace("=benchmarks/", f"={ROOT}/benchmarks/") for word in shlex.split(report.ask)]
        options = read_options(read_flags(plan, words))
        question = read_question(find_flow(options.algorithm), options)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "plan.yaml"
            path.write_text(yaml.safe_dump(dict(report.plan)))
            given = GivenPlan.read(str(path), question)
        return cls(file.stem, report, question, given.plan)

    def priced_by(self, efficiency: Efficiency) -> Question:
        """Return the question with the constants of a runtime."""
        site = self.question.site
        nodes = tuple(replace(node, efficiency=efficiency) for node in site.sources.nodes)
        return replace(self.question, site=replace(site, sources=replace(site.sources, nodes=nodes)))

    def seconds(self, efficiency: Efficiency) -> float:
        """Return the estimated seconds of a step."""
        return self.priced_by(efficiency).estimate(self.plan).seconds

    def error(self, efficiency: Efficiency) -> float:
        """Return predicted over measured seconds, less 1."""
        return self.seconds(efficiency) / self.report.measured_seconds - 1

    def calls(self, efficiency: Efficiency) -> Mapping[str, float]:
        """Return the estimated seconds of each call with a model."""
        question = self.priced_by(efficiency)
        costs = NodeCosts(question.graph, self.plan, question.workload, question.site.sources)
        nodes = {subject_of(node.id): node for node in augment(question.graph, self.plan, 2)}
        return {name: costs.seconds(node) for name, node in nodes.items() if isinstance(node.work, ModelCall)}


def runs(only: Sequence[str] = ()) -> list[Run]:
    """Read all reports, or those of some names."""
    return [Run.read(file) for file in sorted(REPORTS.glob("*.yaml")) if not only or file.stem in only]


def fitted(some: Sequence[Run]) -> Efficiency:
    """Fit the constants of PRIOR to runs, from those of our runtime: least squares in logarithms, with the prior."""
    centre, width = np.log([value for value, _ in PRIOR.values()]), np.array([width for _, width in PRIOR.values()])

    def constants(logs: Any) -> Efficiency:
        return replace(OURS.efficiency, **dict(zip(PRIOR, map(float, np.exp(logs)), strict=True)))

    def residuals(logs: Any) -> Any:
        efficiency = constants(logs)
        errors = [log(run.seconds(efficiency) / run.report.measured_seconds) / SPREAD for run in some]
        return np.concatenate([errors, (logs - centre) / width])

    return constants(least_squares(residuals, centre, diff_step=0.03).x)


def ranges(some: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return, for each kind, the least and the most measured over predicted seconds: the record of answers."""
    found: dict[str, dict[str, float]] = {}
    for kind in ("rollouts", "training"):
        mine = [run for run in some if run.report.kind == kind]
        ratios = [run.report.measured_seconds / run.seconds(PUBLIC.efficiency) for run in mine]
        if ratios:
            found[kind] = {"least": round(min(ratios), 2), "most": round(max(ratios), 2), "runs": len(ratios)}
    return found


def errors(some: Sequence[Run], efficiency: Efficiency) -> dict[str, float]:
    """Return the median and the largest error of runs."""
    found = [abs(run.error(efficiency)) for run in some]
    return {"runs": len(found), "median": median(found), "worst": max(found)} if found else {"runs": 0}


def real_calls() -> dict[str, float]:
    """Return the errors of ReaL's calls and plans on H100s with its runtime, which they set."""
    published = read_published(REAL)
    calls = {name: estimate_calls(published, name) for name in published.plans}
    ends = {name: estimate_end_to_end(published, name, found) for name, found in calls.items()}
    found = [abs(call.ratio - 1) for some in calls.values() for call in some if call.ratio is not None]
    in_order = ends["searched"].predicted_seconds < ends["heuristic"].predicted_seconds
    return {"runs": len(found), "median": median(found), "worst": max(found), "placements_in_order": in_order}


def main() -> int:
    """Print the table, the errors, the order of placements, and the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names of reports")
    parser.add_argument("--explain", action="store_true", help="show each call beside what was measured of it")
    parser.add_argument("--fit", action="store_true", help="fit the constants of `public` again, on half of the runs")
    options = parser.parse_args()
    some = runs(options.only)
    print(table([_row(run) for run in some]))
    if options.explain:
        for run in some:
            print(_calls(run))
    parts = {"fitted": [r for r in some if r.report.fitted], "not_fitted": [r for r in some if not r.report.fitted]}
    found: dict[str, Any] = {name: errors(mine, PUBLIC.efficiency) for name, mine in parts.items()}
    found["our_runtime"] = errors(some, OURS.efficiency)
    found["real_calls"] = real_calls()
    for name, each in found.items():
        if each["runs"]:
            print(f"{name}: {each['runs']} runs, error {each['median']:.1%} in the median, {each['worst']:.1%} at most")
    found["ranges"] = ranges(some)
    found["in_order"] = {" < ".join(pair): _in_order(pair, some) for pair in SAME_REPORT if _has(pair, some)}
    print(f"placements of one report in their order: {found['in_order']}")
    if options.fit:
        best = fitted(parts["fitted"])
        found["fit"] = {name: getattr(best, name) for name in PRIOR}
        print("fit:", {name: f"{value:.4g}" for name, value in found["fit"].items()}, errors(parts["not_fitted"], best))
    print(json.dumps(found))
    return 0


def _row(run: Run) -> dict[str, str]:
    report = run.report
    ours, public = run.seconds(OURS.efficiency), run.seconds(PUBLIC.efficiency)
    return {
        "run": run.name,
        "kind": report.kind,
        "set constants": "yes" if report.fitted else "",
        "measured s": f"{report.measured_seconds:.4g}",
        "our runtime s": f"{ours:.4g}",
        "public s": f"{public:.4g}",
        "error": f"{public / report.measured_seconds - 1:+.0%}",
    }


def _calls(run: Run) -> str:
    estimated, measured = run.calls(PUBLIC.efficiency), run.report.measured_calls
    words = (
        f"{name} {seconds:.3g} s" + (f" (measured {measured[name]:g})" if name in measured else "")
        for name, seconds in estimated.items()
        if not name.endswith("evaluation")
    )
    return f"{run.name}: {', '.join(words)}\n    {run.report.source}"


def _has(pair: Sequence[str], some: Sequence[Run]) -> bool:
    return {run.name for run in some} >= set(pair)


def _in_order(pair: Sequence[str], some: Sequence[Run]) -> bool:
    by_name = {run.name: run.seconds(PUBLIC.efficiency) for run in some}
    return by_name[pair[0]] < by_name[pair[1]]


if __name__ == "__main__":
    raise SystemExit(main())
