"""Shows the metrics of named sets as table rows, each with its 95% interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prefect_rlhf.tasks.rl.evaluation.sets import HIGH, LOW, PREFIX


def set_rows(metrics: Mapping[str, float]) -> list[dict[str, str]]:
    """Return a row for each metric of a set in a step's metrics; empty without sets.

    >>> set_rows({"step": 3, "evaluation_math.avg@4": 0.5, "evaluation_math.avg@4_low": 0.4,
    ...           "evaluation_math.avg@4_high": 0.6})
    [{'set': 'math', 'metric': 'avg@4', 'value': '0.5', '95%': '0.4 to 0.6', 'step': '3'}]
    """
    rows = []
    for name, value in metrics.items():
        call, _, metric = name.rpartition(".")
        if not call.startswith(PREFIX) or metric.endswith((LOW, HIGH)):
            continue
        ends = [metrics[f"{name}{end}"] for end in (LOW, HIGH) if f"{name}{end}" in metrics]
        rows.append(
            {
                "set": call.removeprefix(PREFIX),
                "metric": metric,
                "value": f"{value:.4g}",
                "95%": f"{ends[0]:.4g} to {ends[1]:.4g}" if len(ends) == len((LOW, HIGH)) else "",
                "step": f"{metrics['step']:.0f}",
            }
        )
    return rows


def newest_sets(steps: Iterable[Mapping[str, float]]) -> list[dict[str, str]]:
    """Return the rows of the newest evaluation of each set; sets may have their own periods."""
    found: dict[str, list[dict[str, str]]] = {}
    for metrics in steps:
        rows = set_rows(metrics)
        found |= {name: [row for row in rows if row["set"] == name] for name in {row["set"] for row in rows}}
    return [row for name in sorted(found) for row in found[name]]
