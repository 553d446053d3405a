"""The assumptions behind an answer: values neither stated nor measured, each with the option that changes it."""

from collections.abc import Iterator
from math import exp
from statistics import NormalDist

from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.cost.datasheets.kinds import HOST_SHARE, usual_host_bytes
from prefect_rlhf.placement.cost.workload import LengthDistribution
from prefect_rlhf.placement.models.engine_constants import EXPERT_IMBALANCE
from prefect_rlhf.placement.planner.question import Question
from prefect_rlhf.tasks.play import Play

DEVIATION = 0.745
"""Standard deviation of log response lengths. With it, 0.1% of responses exceed ten times the median length, as RLHFuse
(Zhong et al. 2024, arXiv:2409.13221, section 2) reports for chats."""
AT_LIMIT = 1 / 16
"""The share of responses that end at the limit. It is an assumption."""
PIECES = 7  # groups of equal lengths below the limit; the cost model evaluates each length


def tail(limit: int) -> LengthDistribution:
    """Return response lengths with a long tail, cut at `limit`: log-normal, with a mean of 0.39 times the limit.

    >>> round(tail(1000).mean), tail(1000).longest, tail(1).shares
    (390, 1000, ((1, 1.0),))
    """
    normal = NormalDist(sigma=DEVIATION)
    below, longest = 1 - AT_LIMIT, normal.inv_cdf(1 - AT_LIMIT)
    shares = {limit: AT_LIMIT}
    for piece in range(PIECES):
        length = max(1, round(limit * exp(normal.inv_cdf(below * (piece + 0.5) / PIECES) - longest)))
        shares[length] = shares.get(length, 0.0) + below / PIECES
    return LengthDistribution.of(shares)


def assumptions(question: Question, states_imbalance: bool = False) -> Iterator[str]:
    """Yield a line for each assumption behind the predicted times.

    `states_imbalance` says whether the question states its expert imbalance.
    """
    yield from assumed_of_models(question)
    yield from assumed_of_rows(question, states_imbalance)
    yield from assumed_of_devices(question)


def assumed_of_rows(question: Question, states_imbalance: bool = False) -> Iterator[str]:
    """Yield the assumptions about the rows, which you may know better."""
    workload = question.workload
    longest = workload.responses.longest
    if workload.responses == tail(longest) and longest > 1:
        yield (
            f"responses are {workload.responses.mean:.0f} tokens on average, log-normal, and {AT_LIMIT:.0%} of them "
            f"end at {longest}; --response-length {longest}:1 sets this length for all, a run's rollouts set their own"
        )
    for play in dict.fromkeys(call.play for call in question.graph if call.play is not None):
        if Play.model_validate_json(play.settings).bounds == play:
            yield (
                f"a row of the play has {play.turns:g} turns, {play.observed:g} tokens of answers in all, and waits "
                f"{play.seconds:g} s for each answer; play.expected_turns, play.expected_answer_tokens and "
                "play.seconds_per_answer set this, --response-length with a run's rollouts too"
            )
    has_experts = any(model.shape.experts for model in question.graph.models)
    if has_experts and not states_imbalance and workload.expert_imbalance == EXPERT_IMBALANCE:
        yield (
            f"experts of the fullest device have {EXPERT_IMBALANCE:g} times the mean of tokens wherever devices divide "
            "experts (ep above 1); the memory certificate counts this, and the seconds assume equal loads; "
            "--expert-imbalance changes it"
        )


def assumed_of_models(question: Question) -> Iterator[str]:
    """Yield the assumption that models with an equal name have the same base, for each name without a folder."""
    models = question.graph.models
    for name in dict.fromkeys(model.path for model in models if model.adapter is not None):
        roles = [model.role for model in models if model.content == model.path == name]
        if len(roles) > 1:
            yield (
                f"{' and '.join(roles)} are the same {name}: if they are split alike, its weights are held once; "
                "a model with other weights has another name, or a folder"
            )


def assumed_of_devices(question: Question) -> Iterator[str]:
    """Yield the assumptions about devices, hosts and the controller."""
    sources, site = question.site.sources, question.site
    if not sources.profiles:
        calls = " and ".join(dict.fromkeys(f"{1000 * node.efficiency.call_seconds:g} ms" for node in sources.nodes))
        seen = "" if site.backend == "cpu" else " (seen on an H100)"
        change = "--call-seconds changes it, a profile measures it"
        yield f"a call has a fixed overhead of {calls} on its hosts{seen}; {change}"
    if not sources.profiles and site.backend == "cuda" and any(call.kind == "generate" for call in question.graph):
        layers, steps, rows = (
            " and ".join(dict.fromkeys(f"{1e6 * getattr(node.efficiency, name):g}" for node in sources.nodes))
            for name in ("graph_layer_seconds", "host_step_seconds", "host_row_seconds")
        )
        yield (
            f"vLLM needs {layers} us for a layer of a decoding step besides its reads, by published figures of a "
            f"single stream; its host needs {steps} us more for the step and {rows} us for each row, by two readings "
            "of an H100; a profile measures it"
        )
    usual = [usual_host_bytes(node.device, node.devices_per_node) for node in sources.nodes]
    if site.backend == "cuda" and usual and site.cluster.host_memory_bytes == min(usual) > 0:
        yield (
            f"plans may use {site.cluster.host_memory_bytes / GIB:.0f} GiB of a host's memory, {HOST_SHARE:.0%} of the "
            "memory of usual hosts of these GPUs; --host-memory-gib changes it"
        )
    if site.cluster.room:
        kept = f"{site.cluster.room:.0%} of each device is kept free"
        if site.backend == "cuda":
            yield f"{kept} for what allocators reserve, other processes and smaller cards; --headroom changes it"
        else:
            yield f"{kept} for programs and what allocators keep, as a dry run counts them; --headroom changes it"
    yield f"the controller adds {1000 * sources.orchestration_seconds:g} ms to every node"
