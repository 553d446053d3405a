"""The sharded optimizer's tensors under Hugging Face names, each with its region of a parameter.

Megatron lays all parameters out in flat buffers and gives each data-parallel rank a range of each buffer. The range may
begin or end inside a parameter.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from torch import Tensor

from prefect_rlhf.engines.engine import Shard, StateKind, StatePart
from prefect_rlhf.placement.layout.regions import Region, num_elements, rectangles

MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, order=True)
class _Run:
    """A stretch of storage behind a shard: `passed` elements of the shard's region are in earlier runs."""

    storage: int
    begin: int
    place: int  # in the order of shards and of their runs
    end: int
    name: str = field(compare=False)
    region: Region = field(compare=False)
    passed: int = field(compare=False)


def state_parts(optimizer: Any, shards: Mapping[str, Shard]) -> Iterator[StatePart]:
    """Yield the tensors of a Megatron DistributedOptimizer on this rank, as flat views."""
    runs = _sorted_runs(shards)
    for parameter, (group, place) in optimizer.model_param_group_index_map.items():
        main = optimizer.optimizer.param_groups[group]["params"][place]
        state = optimizer.optimizer.state.get(main, {})
        tensors: dict[StateKind, Tensor] = {"main": main, **{kind: state[kind] for kind in MOMENTS if kind in state}}
        share = optimizer._get_model_param_range_map(parameter)["param"]
        for name, region, first in _pieces(parameter, share.start, share.end, runs):
            for kind, tensor in tensors.items():
                values = tensor.detach().view(-1)[first : first + num_elements(region)]
                yield StatePart(kind, name, region, values)


def _pieces(parameter: Tensor, start: int, stop: int, runs: Sequence[_Run]) -> Iterator[tuple[str, Region, int]]:
    """Yield the regions of elements `start` to `stop` of a parameter, each with its place in that range.

    They follow from the places of the shards' views in the parameter's storage, so fused parameters are separated.
    """
    storage, first = _identity(parameter), int(parameter.storage_offset()) + start
    last = first + stop - start
    after = bisect_left(runs, (storage, last), key=lambda run: (run.storage, run.begin))
    earlier = (runs[index] for index in range(after - 1, -1, -1))
    held = takewhile(lambda run: run.storage == storage and run.end > first, earlier)  # runs do not overlap
    for run in sorted(held, key=lambda run: run.place):
        low, high = max(run.begin, first), min(run.end, last)
        for region in rectangles(run.region, run.passed + low - run.begin, run.passed + high - run.begin):
            yield run.name, region, low - first
            low += num_elements(region)


def _sorted_runs(shards: Mapping[str, Shard]) -> list[_Run]:
    """Return the runs of all shards by storage and place in it: all weights may lie in a single buffer."""
    runs: list[_Run] = []
    for name, shard in shards.items():
        storage, passed = _identity(shard.view), 0
        for begin, count in _runs(shard.view):
            runs.append(_Run(storage, begin, len(runs), begin + count, name, shard.region, passed))
            passed += count
    return sorted(runs)


def _runs(view: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the stretches of storage behind a view, in its row-major order: the start of each, and its elements."""
    if view.is_contiguous():
        yield int(view.storage_offset()), view.numel()
        return
    for part in view:
        yield from _runs(part)


def _identity(tensor: Tensor) -> int:
    """Identify a tensor's storage, also while it is emptied."""
    identity: int = tensor.untyped_storage()._cdata
    return identity
