"""The sharded optimizer's tensors under Hugging Face names: the region of a parameter that each piece is.

Megatron lays all parameters out in flat buffers and gives each data-parallel rank a range of each buffer. The range may
begin or end inside a parameter.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from prefect_rlhf.engines.engine import Shard, StateKind, StatePart
from prefect_rlhf.placement.layout.regions import Region, num_elements, rectangles

MOMENTS: tuple[StateKind, ...] = ("exp_avg", "exp_avg_sq")


def state_parts(optimizer: Any, shards: Mapping[str, Shard]) -> Iterator[StatePart]:
    """Yield the tensors of a Megatron DistributedOptimizer on this rank, as flat views."""
    for parameter, (group, place) in optimizer.model_param_group_index_map.items():
        main = optimizer.optimizer.param_groups[group]["params"][place]
        state = optimizer.optimizer.state.get(main, {})
        tensors: dict[StateKind, Tensor] = {"main": main, **{kind: state[kind] for kind in MOMENTS if kind in state}}
        share = optimizer._get_model_param_range_map(parameter)["param"]
        for name, region, first in _pieces(parameter, share.start, share.end, shards):
            for kind, tensor in tensors.items():
                values = tensor.detach().view(-1)[first : first + num_elements(region)]
                yield StatePart(kind, name, region, values)


def _pieces(parameter: Tensor, start: int, stop: int, shards: Mapping[str, Shard]) -> Iterator[tuple[str, Region, int]]:
    """Yield the regions of elements `start` to `stop` of a parameter, each with its place in that range.

    They follow from the places of the shards' views in the parameter's storage, so fused parameters are separated.
    """
    storage, first = _identity(parameter), int(parameter.storage_offset()) + start
    last = first + stop - start
    for name, shard in shards.items():
        if _identity(shard.view) != storage:
            continue
        passed = 0  # elements of the region in earlier runs
        for begin, count in _runs(shard.view):
            low, high = max(begin, first), min(begin + count, last)
            for region in rectangles(shard.region, passed + low - begin, passed + high - begin) if low < high else ():
                yield name, region, low - first
                low += num_elements(region)
            passed += count


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
