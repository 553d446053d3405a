"""Domains: the mesh sizes left to undecided calls, with a bound below the threshold.

On few devices a call takes too long; on many it must overlap too many calls. So at each depth of the search, the
smallest and the largest classes of meshes are excluded until a class may be part of a plan. The least time, area and
size of an undecided call are then taken over the classes in between, which raises the bound of all deeper decisions.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.exact.search_state import EVALUATIONS, LEAST_LEFT
from prefect_rlhf.placement.search.partial.partial import AREA, SIZE, US, Partial, bound_probe
from prefect_rlhf.placement.search.tables.dependencies import NEVER
from prefect_rlhf.placement.search.tables.tables import UNDECIDED, Tables


@compiled
def narrow(t: Tables, p: Partial, threshold: int, tally: Ints) -> bool:
    """Narrow the domains of all undecided calls at the current depth. Returns False if a domain is empty.

    `tally` is the tally of `SearchState`: LEAST_LEFT is lowered to the least bound of the excluded classes.
    """
    for call in range(t.num_calls):
        if p.option[call] == UNDECIDED and not narrow_call(t, p, call, threshold, tally):
            return False
    return True


@inner
def narrow_call(t: Tables, p: Partial, call: int, threshold: int, tally: Ints) -> bool:
    """Narrow the domain of a call. Returns False if it is empty."""
    domain = p.domain[p.depth[0]]
    low, high = domain[0, call], domain[1, call]
    while low <= high and excluded(t, p, call, t.class_by_size[low], threshold, tally):
        low += 1
    while low < high and excluded(t, p, call, t.class_by_size[high], threshold, tally):
        high -= 1
    domain[0, call], domain[1, call] = low, high
    fill_least(t, p, call)
    return low <= high


@inner
def excluded(t: Tables, p: Partial, call: int, mesh_class: int, threshold: int, tally: Ints) -> bool:
    """Whether no plan that ends before the threshold has the call on a mesh of this class."""
    us = t.least_in_class[call, mesh_class]
    if us == NEVER:
        return True
    value = bound_probe(t, p, call, us, t.class_size[mesh_class], threshold)
    tally[EVALUATIONS] += 1
    if value < threshold:
        return False
    tally[LEAST_LEFT] = min(tally[LEAST_LEFT], value)
    return True


@inner
def fill_least(t: Tables, p: Partial, call: int) -> None:
    """Write the least time, area and size of a call on the classes of its domain."""
    least, domain = p.least[p.depth[0]], p.domain[p.depth[0]]
    us, area, size = NEVER, NEVER * t.num_devices, t.num_devices
    for place in range(domain[0, call], domain[1, call] + 1):
        mesh_class = t.class_by_size[place]
        fastest = t.least_in_class[call, mesh_class]
        if fastest < NEVER:
            us = min(us, fastest)
            area = min(area, fastest * t.class_size[mesh_class])
            size = min(size, t.class_size[mesh_class])
    least[US, call], least[AREA, call], least[SIZE, call] = us, area, size


@inner
def deeper(t: Tables, p: Partial) -> None:
    """Go down a depth, with the domains of the depth above."""
    above = p.depth[0]
    p.depth[0] = above + 1
    for call in range(t.num_calls):
        for row in range(2):
            p.domain[above + 1, row, call] = p.domain[above, row, call]
        for row in range(3):
            p.least[above + 1, row, call] = p.least[above, row, call]
