"""Sequence parallelism: outside of attention and the feed-forward products, tensor-parallel ranks divide the tokens.

Norms, residuals and the saved inputs between products are divided by tp. A gather of all tokens before a product and a
reduce-scatter after the next replace an all-reduce (Korthikanti et al. 2022, section 4). Megatron's layers decide it
when they are built; here a train_step turns it on only while it runs, because other calls use the same layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from prefect_rlhf.engines.megatron.model import Transformer


@contextmanager
def tokens_over_tp(model: Transformer, is_on: bool) -> Iterator[None]:
    """Make the model's layers divide tokens, if `is_on`; the number of tokens must be a multiple of tp."""
    if not is_on:
        yield
        return
    random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # no layer draws random numbers
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()  # the place of gathered tokens
    _switch(model, True)
    try:
        yield
    finally:
        _switch(model, False)
        parallel_state.get_global_memory_buffer().buffer.clear()


def _switch(model: Transformer, is_on: bool) -> None:
    """Set the attributes that Megatron's constructors set."""
    model.config.sequence_parallel = is_on
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            linear: Any = module
            linear.sequence_parallel = is_on
            if isinstance(module, ColumnParallelLinear):
                linear.allreduce_dgrad = not is_on and model.pg_collection.tp.size() > 1
