"""Which layers each pipeline stage has: the one rule that layouts, engines and estimates follow."""

from __future__ import annotations

from functools import cache


@cache
def stages(num_layers: int, pp: int) -> tuple[range, ...]:
    """The layers of each stage, as even as possible; earlier stages get the extra ones.

    The last stage also has the output, which costs about as much as a layer or two, so it is the one to be short.

    >>> [len(layers) for layers in stages(30, 4)]
    [8, 8, 7, 7]
    """
    size, extra = divmod(num_layers, pp)
    starts = [stage * size + min(stage, extra) for stage in range(pp + 1)]
    return tuple(range(start, stop) for start, stop in zip(starts, starts[1:], strict=False))
