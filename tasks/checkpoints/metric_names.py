"""The names of a call's metrics, as known before it runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from prefect_rlhf.placement.graph import Call
from prefect_rlhf.tasks.host_rewards import HostRewards
from prefect_rlhf.tasks.rl.evaluation.sets import SetSettings, record_set

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class MetricNames:
    """The known names of a call's metrics, and prefixes of further names that it may report.

    >>> names = MetricNames(("exact", "failed", "seconds"), others=("exact/",))
    >>> names.excludes("exat"), names.excludes("exact/length")
    (True, False)
    """

    known: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def excludes(self, name: str) -> bool:
        """Return whether no metric of the call can have this name."""
        return name not in self.known and not name.startswith(self.others)


def hint(metric: str, owner: str, known: Sequence[str]) -> str:
    """Return a correction for a metric that the `owner` lacks, such as a similar name.

    >>> hint("reward.exat", "reward has", ("reward.exact", "reward.failed"))
    'reward.exact, perhaps: reward has reward.exact, reward.failed'
    """
    near = get_close_matches(metric[:100], known, n=1)
    return f"{f'{near[0]}, perhaps' if near else 'another'}: {owner} {', '.join(known) or 'no metrics'}"


PLAY_METRICS = ("turns", "own_tokens", "observed_tokens", "failed", "answer_seconds")


def metric_names(call: Call, tried: Sequence[str] | None = None) -> MetricNames:
    """Return the names of a call's metrics; `tried` are its metrics on made-up rows, if it was tried.

    A shipped computation has the same names on any rows. A user's computation may derive names from its rows.
    """
    if call.kind == "inference":
        return MetricNames(("failed",) if "scores" in call.outputs else ())
    if call.kind == "generate":
        own = () if call.play is None else PLAY_METRICS
        return MetricNames((*own, "truncated", "kept_mass"), ("play/",) if own else ())
    if call.on_hosts:
        functions = tuple(HostRewards.model_validate_json(call.operation.settings).functions)
        return MetricNames(
            (*functions, "failed", "unscored", "seconds"), tuple(f"{function}/" for function in functions)
        )
    if call.operation.name == record_set.name:
        of_set = SetSettings.model_validate_json(call.operation.settings)
        return MetricNames(of_set.metrics, of_set.perhaps)
    is_ours = call.kind == "compute" and call.operation.module.partition(".")[0] == PACKAGE
    return MetricNames(tuple(tried or ()), () if is_ours and tried is not None else ("",))
