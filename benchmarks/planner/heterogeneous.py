"""Two kinds of nodes: APP's table III (33B models, 8 A100 alone, and with 8 V100 of 32 GB), planned without devices.

    python -m benchmarks.planner.heterogeneous [--batch-sizes 16 32] [--evaluations N] [--model llama-33b]

The paper (Xiao et al. 2023, arXiv:2312.11819, section VI-B) keeps all four models at 33B, prompts and responses at 256
tokens, one epoch of one batch, and takes the largest batch that fits; it does not say which. Nor does it say what
connects the two kinds; 200 Gbit/s, the least that it names, is assumed. Nor does it state the memory of the hosts: none
of the plans is limited by it. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.errors.table import table
from prefect_rlhf.flows.forms.plan_options import PlanOptions
from prefect_rlhf.flows.planning.what_if import read_question
from prefect_rlhf.flows.ppo import ppo
from prefect_rlhf.placement.devices.mesh import DeviceMesh
from prefect_rlhf.placement.engine_traits import TRAITS
from prefect_rlhf.placement.planner.best_plan import plan_graph
from prefect_rlhf.placement.planner.planned import Planned
from prefect_rlhf.placement.schedule.estimate import training

ALONE, BOTH = "1x8:a100-80", "1x8:a100-80+1x8:v100-32"
PAPERS = {"a100 alone": 0.69, "app": 0.79}  # samples per second, table III: Flattening, Heterogeneous Separation
APPS_PINS = {"ref_inference": DeviceMesh.parse("n1:0-3"), "reward_inference": DeviceMesh.parse("n1:4-7")}
"""Reference and reward model on four V100s each; all else is on the A100s."""
KINDS = ("A100", "V100")
HOST_GIB = 4096.0  # of each node, so that it limits no plan


@dataclass(frozen=True, slots=True)
class Setting:
    """One row: a name, the cluster, and which calls must be where."""

    name: str
    cluster: str
    pins: Mapping[str, DeviceMesh]


def settings(calls: list[str]) -> Iterator[Setting]:
    """The A100s alone, APP's placement without and with its copy that generates, and the best found on both kinds."""
    yield Setting("a100 alone", ALONE, {})
    rest = {name: DeviceMesh.parse("n0:0-7") for name in calls if name not in APPS_PINS}
    yield Setting("app", BOTH, {**APPS_PINS, **rest})
    yield Setting("app, generation on 2", BOTH, {**APPS_PINS, **rest, "actor_generate": DeviceMesh.parse("n0:0-1")})
    yield Setting("both kinds", BOTH, {})


def search_plan(setting: Setting, model: str, batch_size: int, evaluations: float | None) -> Planned:
    """Plan PPO with four models of one size. Raises InvalidInput where no plan fits."""
    question = read_question(
        ppo,
        PlanOptions(
            cluster=setting.cluster,
            network="200",
            host_memory_gib=HOST_GIB,
            models={"actor": model, "critic": model},
            prompt_length="256",
            response_length="256:1",
            batch_size=batch_size,
            parameters={"algo": {"update": {"mini_batches": 1, "epochs": 1}}},
        ),
    )
    trained = replace(question, graph=training(question.graph))
    return plan_graph(trained, pins=setting.pins, evaluations=evaluations)


def row(setting: Setting, batch_size: int, planned: Planned) -> dict[str, Any]:
    """A plan's seconds and rate, and the calls that it puts on V100s."""
    kinds = {
        name: {KINDS[device.node] for device in placement.mesh.devices()}
        for name, placement in planned.plan.placements
        if TRAITS[placement.engine].holds_weights
    }
    return {
        "setting": setting.name,
        "batch_size": batch_size,
        "seconds": planned.seconds,
        "samples_per_second": batch_size / planned.seconds,
        "lower_bound_seconds": planned.lower_bound_seconds,
        "on_v100": sorted(name for name, used in kinds.items() if "V100" in used),
    }


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row of the printed table."""
    words = {name: f"{value:.3f}" if isinstance(value, float) else str(value) for name, value in row.items()}
    return words | {"on_v100": ", ".join(row["on_v100"]) or "-"}


def gain(rows: Sequence[Mapping[str, Any]], setting: str) -> float | None:
    """The best throughput of a setting over that of the A100s alone, less 1; None where one of them has no plan."""
    best = {
        name: max((row["samples_per_second"] for row in rows if row["setting"] == name), default=0.0)
        for name in ("a100 alone", setting)
    }
    return best[setting] / best["a100 alone"] - 1 if all(best.values()) else None


def main() -> None:
    """Print a table, the gains beside the paper's, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-33b", help="shape of all four models")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--evaluations", type=float, help="of search, for each plan")
    options = parser.parse_args()
    calls = ["actor_generate", "critic_inference", "actor_train", "critic_train"]
    rows: list[dict[str, Any]] = []
    for setting in settings(calls):
        for batch_size in options.batch_sizes:
            try:
                planned = search_plan(setting, options.model, batch_size, options.evaluations)
                rows.append(row(setting, batch_size, planned))
            except InvalidInput as error:
                print(f"{setting.name}, batch {batch_size}: {error}")
    print(table([cells(line) for line in rows]))
    gains = {name: gain(rows, name) for name in ("app", "both kinds")}
    for name, above in gains.items():
        words = "no plan to compare" if above is None else f"{above:+.1%}"
        print(f"{name}: {words} in samples per second over the A100s alone")
    paper = PAPERS["app"] / PAPERS["a100 alone"] - 1
    print(f"the paper: {paper:+.1%} ({PAPERS['a100 alone']} to {PAPERS['app']} samples per second)")
    print(json.dumps({"rows": rows, "gains": gains, "paper": paper}))


if __name__ == "__main__":
    main()
