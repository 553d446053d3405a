"""Groups: a call's options on a class of meshes. In the first decisions, a stand-in represents them.

A stand-in has the shortest time, the fewest bytes and the shortest moves of any option in its group, so a bound with it
holds for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from prefect_rlhf.placement.search.compiled import Ints, starts
from prefect_rlhf.placement.search.problem import PlannedCall, Problem

NO_COPY, ANY_COPY = -1, -2


def groups_of(call: PlannedCall) -> list[Ints]:
    """A call's options on each class of meshes that it can run on, the fastest first."""
    classes = np.array([option.mesh_class for option in call.options])
    by_duration = np.argsort([option.microseconds for option in call.options], kind="stable")
    return [by_duration[classes[by_duration] == mesh_class] for mesh_class in np.unique(classes)]


def option_arrays(problem: Problem, groups: Mapping[str, list[Ints]]) -> dict[str, Ints]:
    """The arrays of `Tables` about options; each call's groups follow its own options."""
    copies = dict.fromkeys(option.copy for call in problem.calls for option in call.options if option.copy is not None)
    copy_number = {copy: number for number, copy in enumerate(copies)}
    columns = [_columns(call, copy_number, groups[call.name]) for call in problem.calls]
    lengths = [len(call.options) + len(groups[call.name]) for call in problem.calls]
    none = np.zeros(0, np.int64)
    members = [group for call in problem.calls for group in [*[none] * len(call.options), *groups[call.name]]]
    # always contiguous: compiled code is specific to a memory layout, and another layout would compile anew
    arrays = np.ascontiguousarray(np.concatenate(columns, axis=1))
    cost, mesh_class, static, active, copy, shared, fullest, loaded = arrays
    return {
        "option_start": starts(lengths),
        "group_start": starts(lengths)[:-1] + np.array([len(call.options) for call in problem.calls], dtype=np.int64),
        "member_start": starts([len(group) for group in members]),
        "member": np.concatenate(members).astype(np.int64),
        "option_cost": cost,
        "option_class": mesh_class,
        "option_static": static,
        "option_active": active,
        "option_copy": copy,
        "option_shared": shared,
        "option_fullest": fullest,
        "option_loaded": loaded,
    }


def _columns(call: PlannedCall, copy_number: dict[str, int], groups: list[Ints]) -> Ints:
    """Columns of the options and then of the groups: cost, class, static, ... as in `option_arrays`."""
    rows = [
        (
            option.microseconds,
            option.mesh_class,
            option.static_bytes,
            option.peak_bytes - option.static_bytes,
            NO_COPY if option.copy is None else copy_number[option.copy],
            option.static_bytes,
            max(option.peak_bytes, option.fullest_bytes),
            max(option.static_bytes, option.loaded_bytes),
        )
        for option in call.options
    ]
    own = np.array(rows, dtype=np.int64).T
    return np.concatenate([own, *(_stand_in(own[:, group]) for group in groups)], axis=1)


def _stand_in(columns: Ints) -> Ints:
    cost, mesh_class, static, active, copy, shared, fullest, loaded = columns
    common_copy = copy[0] if (copy == copy[0]).all() else ANY_COPY
    least = cost.min(), mesh_class[0], static.min(), active.min()
    column = (*least, common_copy, shared.max(), fullest.min(), loaded.min())
    return np.array(column, dtype=np.int64)[:, None]
