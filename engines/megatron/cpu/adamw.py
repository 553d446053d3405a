"""AdamW on CPU: a single pass over memory, in blocks that fit a core's cache, including rounding to compute weights.

Every element gets the same operations as from torch's fused AdamW followed by Megatron's copy, so the results are equal
bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 16  # elements: four tensors, a scaled gradient and rounded weights are 1.4 MB; many vectors of any width


@torch.no_grad()
def step(distributed: Any, clip: float) -> None:
    """Update a Megatron DistributedOptimizer's main weights by their gradients times `clip`, and round them.

    Other replicas' weights are not gathered. The gradients keep their values.
    """
    targets = _targets(distributed)
    scratch, divisor = torch.empty(BLOCK), None if clip == 1 else torch.tensor(1 / clip)
    for group in distributed.optimizer.param_groups:
        mains: list[Tensor] = []
        gradients: list[Tensor] = []
        moments: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        distributed.optimizer._init_group(group, mains, gradients, moments, squares, [], steps)
        for main, *others, count in zip(mains, gradients, moments, squares, steps, strict=True):
            count.add_(1)
            flat = [tensor.view(-1) for tensor in (main, *others)]
            for number, block in enumerate(zip(*(torch.split(tensor, BLOCK) for tensor in flat), strict=True)):
                _update(block, count, group, scratch, divisor)
                if main in targets:
                    start = number * BLOCK
                    targets[main][start : start + len(block[0])].copy_(block[0])


def _update(
    block: tuple[Tensor, ...], count: Tensor, group: dict[str, Any], scratch: Tensor, divisor: Tensor | None
) -> None:
    """Update a block of (main, gradient, first moment, second moment)."""
    main, gradient, moment, square = block
    if divisor is not None:  # the kernel also stores the divided gradient: here into the cache, not into memory
        gradient = scratch[: len(gradient)].copy_(gradient)
    torch._fused_adamw_(
        [main],
        [gradient],
        [moment],
        [square],
        [],
        [count],
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )


def _targets(distributed: Any) -> dict[Tensor, Tensor]:
    """Return the flat compute weights of each main weight that is a copy of them."""
    groups = zip(distributed.shard_fp32_from_float16_groups, distributed.model_float16_groups, strict=True)
    return dict(pair for mains, weights in groups for pair in _pairs(distributed, mains, weights))


def _pairs(distributed: Any, mains: list[Tensor], weights: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield main weights with this rank's range of their compute weights, as Megatron's copy finds it."""
    for main, weight in zip(mains, weights, strict=True):
        buffer, _, bucket = distributed.model_param_gbuf_map[weight]
        share = distributed._get_model_param_range_map(weight)["gbuf_world_in_bucket"]
        yield main, distributed.buffers[buffer].buckets[bucket].param_data.view(-1)[share.start : share.end]
