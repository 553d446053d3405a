"""Which sizes of mesh are left to undecided calls: those on which alone the bound is not yet at the threshold.

On few devices a call takes too long, on many it must overlap too much. So at each depth of the search the smallest and
largest classes of meshes are tried one by one, until one is found that may be part of a plan. What an undecided call
takes at least is then that of the classes between, which raises the bound of all that is decided below.
"""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import Ints, compiled, inner
from prefect_rlhf.placement.search.partial.partial import AREA, SIZE, US, Partial, bound_probe
from prefect_rlhf.placement.search.tables.dependencies import NEVER
from prefect_rlhf.placement.search.tables.tables import UNDECIDED, Tables


@compiled
def narrow(t: Tables, p: Partial, threshold: int, least_left: Ints) -> bool:
    """Narrow the domains of all undecided calls at the present depth; False when one has none left.

    Lowers `least_left[0]` to the least bound of what is excluded, and adds the bounds computed to `least_left[1]`.
    """
    for call in range(t.num_calls):
        if p.option[call] == UNDECIDED and not narrow_call(t, p, call, threshold, least_left):
            return False
    return True


@inner
def narrow_call(t: Tables, p: Partial, call: int, threshold: int, least_left: Ints) -> bool:
    """The same for one call."""
    domain = p.domain[p.depth[0]]
    low, high = domain[0, call], domain[1, call]
    while low <= high and excluded(t, p, call, t.class_by_size[low], threshold, least_left):
        low += 1
    while low < high and excluded(t, p, call, t.class_by_size[high], threshold, least_left):
        high -= 1
    domain[0, call], domain[1, call] = low, high
    fill_least(t, p, call)
    return low <= high


@inner
def excluded(t: Tables, p: Partial, call: int, mesh_class: int, threshold: int, least_left: Ints) -> bool:
    """Whether no plan that ends before the threshold has the call on a mesh of this class."""
    us = t.least_in_class[call, mesh_class]
    if us == NEVER:
        return True
    value = bound_probe(t, p, call, us, t.class_size[mesh_class], threshold)
    least_left[1] += 1
    if value < threshold:
        return False
    least_left[0] = min(least_left[0], value)
    return True


@inner
def fill_least(t: Tables, p: Partial, call: int) -> None:
    """Write what a call takes at least on the classes of its domain."""
    least, domain = p.least[p.depth[0]], p.domain[p.depth[0]]
    us, area, size = NEVER, NEVER * t.num_devices, t.num_devices
    for place in range(domain[0, call], domain[1, call] + 1):
        found = t.class_by_size[place]
        fastest = t.least_in_class[call, found]
        if fastest < NEVER:
            us = min(us, fastest)
            area = min(area, fastest * t.class_size[found])
            size = min(size, t.class_size[found])
    least[US, call], least[AREA, call], least[SIZE, call] = us, area, size


@inner
def deeper(t: Tables, p: Partial) -> None:
    """Go one depth down, with the domains of the depth above."""
    above = p.depth[0]
    p.depth[0] = above + 1
    for call in range(t.num_calls):
        for row in range(2):
            p.domain[above + 1, row, call] = p.domain[above, row, call]
        for row in range(3):
            p.least[above + 1, row, call] = p.least[above, row, call]
