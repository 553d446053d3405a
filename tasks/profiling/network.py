"""Measures messages between nodes: bandwidth and latency."""

from collections.abc import Callable, Sequence
from contextlib import closing

from prefect_rlhf.engines.gang.open import open_gang
from prefect_rlhf.engines.rank.profiling.profiling_rank import ProfilingRank
from prefect_rlhf.placement.cost.times.profile import Subject
from prefect_rlhf.tasks.profiling.bench import DEADLINE_SECONDS

LARGE_BYTES = 16 << 20  # takes 1.3 s at 100 Mbit/s
REPEATS = 5
NETWORK_MESSAGES = 2  # that `time_network` times


def time_network(
    subject: Subject, step: Callable[[str], None], node_devices: Sequence[str] = ()
) -> tuple[float, float]:
    """Return a device's bytes per second to another node, and a message's latency in seconds.

    A device of every second node sends to the next node, all concurrently, in the same way as moves of weights are
    timed. The slowest counts.
    """
    ranks = (1,) * subject.num_nodes
    gang = open_gang(
        ranks,
        rank_factory=ProfilingRank,
        device=subject.kind,
        engines=(),
        through_ray=True,
        node_devices=node_devices,
    )
    with closing(gang):

        def seconds(num_bytes: int) -> float:
            step(f"a message of {num_bytes} bytes to another node")
            orders = dict.fromkeys(range(gang.size), (num_bytes, REPEATS))
            sent = gang.call(
                ProfilingRank.send_one_way, orders, doing="profile: send", deadline_seconds=DEADLINE_SECONDS
            )
            return max(sent.values())

        latency = seconds(1)
        return LARGE_BYTES / max(1e-9, seconds(LARGE_BYTES) - latency), latency
