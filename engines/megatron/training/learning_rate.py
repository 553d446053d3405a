"""The learning rate of an optimizer step, which depends only on the step's number, so a resumed run has the same
rates.
"""

import math

from prefect_rlhf.placement.models.model import OptimizerSpec


def rate_share(spec: OptimizerSpec, step: int) -> float:
    """Return the rate of the `step`-th optimizer step as a share of the highest rate; steps count from 1.

    It rises linearly to 1 at step `warmup_steps`, stays there for another step, and falls so that it would reach its
    lowest value a step after `decay_steps`. It follows transformers' schedules, except that no step has a rate of 0.

    >>> spec = OptimizerSpec(warmup_steps=2, schedule="linear", decay_steps=6)
    >>> [rate_share(spec, step) for step in (1, 2, 3, 4, 5, 6, 7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    if step <= spec.warmup_steps:
        return step / spec.warmup_steps
    if spec.schedule == "constant":
        return 1.0
    assert spec.decay_steps is not None  # a run sets it
    gone = min(1.0, (step - 1 - spec.warmup_steps) / (spec.decay_steps - spec.warmup_steps))
    left = 1 - gone if spec.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2
    return spec.min_lr_ratio + (1 - spec.min_lr_ratio) * left
