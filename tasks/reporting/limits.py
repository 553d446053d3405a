"""Metrics above a limit, reported to Prefect as events that automations can handle."""

from collections.abc import Mapping

from prefect.events import emit_event
from prefect.runtime import flow_run

ABOVE_LIMIT = "prefect-rlhf.metric.above-limit"
"""The event. Its resource is the flow run, so that an automation can suspend it; a label names the metric."""
METRIC = "prefect-rlhf.metric"


class Limits:
    """Checks each step's metrics against limits.

    A metric is reported when it rises above its limit, and again only after it has fallen below it. NaN is above any
    limit.
    """

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._limits = limits
        self._above: set[str] = set()
        self._unknown: set[str] = set()

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """Emit an event for each metric that has risen above its limit since the last step; return a log line for each.

        A limit on a metric that its call never reports also gets a line, once.
        """
        lines = []
        for name, limit in self._limits.items():
            if name not in metrics:  # its call does not run in every step
                lines += self._once_unknown(name, metrics)
                continue
            if metrics[name] <= limit:
                self._above.discard(name)
            elif name not in self._above:
                self._above.add(name)
                _tell(name, metrics, limit)
                lines.append(f"{name} is {metrics[name]:.4g} in step {metrics['step']}, above its limit of {limit:.4g}")
        return lines

    def _once_unknown(self, name: str, metrics: Mapping[str, float]) -> list[str]:
        call = name.rpartition(".")[0]
        known = [metric for metric in metrics if metric.rpartition(".")[0] == call]
        has_no_scores = metrics.get(f"{call}.unscored") == 1  # a mean over no score is left out in such a step
        if not known or has_no_scores or name in self._unknown:
            return []
        self._unknown.add(name)
        return [
            f"limits: {name} is not a metric of step {metrics['step']}, so it is not checked; "
            f"{call} has {', '.join(known)}"
        ]


def _tell(name: str, metrics: Mapping[str, float], limit: float) -> None:
    resource = {
        "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
        "prefect.resource.name": str(flow_run.name),
        METRIC: name,
    }
    payload = {"step": metrics["step"], "value": repr(metrics[name]), "limit": limit}  # JSON has no NaN
    emit_event(event=ABOVE_LIMIT, resource=resource, payload=payload)
