"""Memory of the fullest device of a mesh: pipeline stages differ, and calls on all devices add to each of them."""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import Ints, inner
from prefect_rlhf.placement.search.partial.packing import may_share, mesh_class
from prefect_rlhf.placement.search.tables.tables import UNDECIDED, Tables


@inner
def beyond_fullest(t: Tables, option: Ints) -> int:
    """Bytes by which the fullest devices are too small, summed over the decided calls that run there."""
    excess = 0
    for running in range(t.num_calls):
        if option[running] != UNDECIDED:
            used = t.option_fullest[t.option_start[running] + option[running]] + static_everywhere(t, option, running)
            excess += max(0, used - t.most_bytes)
    return excess


@inner
def static_everywhere(t: Tables, option: Ints, running: int) -> int:
    """Static bytes that calls whose mesh is all devices add to those of one call; of a shared copy the first's."""
    static = 0
    for call in range(t.num_calls):
        if call == running or option[call] == UNDECIDED or t.class_size[mesh_class(t, option, call)] < t.num_devices:
            continue
        if not (copies_may_be_one(t, option, call, running) or counts_already(t, option, call, running)):
            static += t.option_static[t.option_start[call] + option[call]]
    return static


@inner
def counts_already(t: Tables, option: Ints, call: int, running: int) -> bool:
    """Whether an earlier call on all devices may have brought the copy."""
    for other in range(call):
        if other != running and option[other] != UNDECIDED:
            everywhere = t.class_size[mesh_class(t, option, other)] == t.num_devices
            if everywhere and copies_may_be_one(t, option, call, other):
                return True
    return False


@inner
def copies_may_be_one(t: Tables, option: Ints, first: int, second: int) -> bool:
    """Whether the static bytes of two decided calls can be one copy."""
    a, b = t.option_start[first] + option[first], t.option_start[second] + option[second]
    return may_share(t.option_copy[a], t.option_copy[b])
