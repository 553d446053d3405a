"""vLLM's key-value cache: rows fill blocks of tokens as they grow, which limits the number of rows in flight.

A row begins when there is room for its prompt. If the rows in flight outgrow the cache, the latest row is preempted: it
loses its blocks, and computes them again when it resumes.
"""

from functools import lru_cache
from math import ceil, floor, log10
from typing import NamedTuple

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.cost.datasheets.hardware import GIB
from prefect_rlhf.placement.cost.sizes import ModelSizes
from prefect_rlhf.placement.cost.workload import Workload
from prefect_rlhf.placement.models.engine_constants import CACHE_BLOCK, PASS_TOKENS

NULL_BLOCKS = 2  # blocks that no row fills, vLLM's own null block among them
MOST_AT_ONCE = 1024  # rows in flight on CUDA: vLLM's own limit on large GPUs; each takes logits
LEAST_SHARE = 8  # rows in flight on CUDA have at least an eighth of the longest row's tokens on average


class InFlight(NamedTuple):
    """A replica's rows in flight: in the first wave, and later, when new rows replace finished rows."""

    first: float
    later: float


def block_bytes(sizes: ModelSizes, tp: int) -> int:
    """Return the bytes of a cache block, for all layers, on a device."""
    return CACHE_BLOCK * sizes.num_layers * sizes.cache_bytes_per_token(tp)


def whole_cache_bytes(rows: int, length: int, sizes: ModelSizes, tp: int) -> int:
    """Return the bytes on each device of a cache for `rows` rows of `length` tokens."""
    return (rows * _blocks(length) + NULL_BLOCKS) * block_bytes(sizes, tp)


def expected_cache_bytes(rows: int, workload: Workload, sizes: ModelSizes, tp: int) -> int:
    """Return the bytes on each device that `rows` rows, begun together, are expected to fill at their peak."""
    blocks = max(_blocks(workload.longest), int(rows * _tokens_of_a_row(workload).first) // CACHE_BLOCK + 1)
    return min((blocks + NULL_BLOCKS) * block_bytes(sizes, tp), whole_cache_bytes(rows, workload.longest, sizes, tp))


def rows_at_once(rows: int, cache_bytes: int, length: int, sizes: ModelSizes, tp: int) -> int:
    """Return the largest number of rows in flight that vLLM allows on CUDA, with a cache of `cache_bytes` on each
    device.

    The cache has room for fewer, unless the rows in flight are shorter than LEAST_SHARE of `length`, the longest.
    """
    held = (cache_bytes // block_bytes(sizes, tp) - NULL_BLOCKS) // _blocks(length)
    return min(rows, LEAST_SHARE * max(1, held), MOST_AT_ONCE)


def pass_tokens(rows: int, length: int, at_once: int) -> int:
    """Return the largest number of tokens in a pass, which vLLM tries when it builds the model.

    `rows` is the largest number of rows of a generate, `length` the longest row, `at_once` the most rows in flight.
    """
    return max(length, at_once, min(rows * length, PASS_TOKENS))


def gib_above(num_bytes: float) -> float:
    """Return GiB as a plan file writes them: three digits, rounded up.

    >>> gib_above(12345678901), gib_above(1 << 20)
    (11.5, 0.000977)
    """
    gib = num_bytes / GIB
    digits = 2 - floor(log10(gib))
    return ceil(gib * 10**digits) / 10**digits if digits >= 0 else float(ceil(gib))


def check_cache(field: str, cache_bytes: int | None, length: int, sizes: ModelSizes, tp: int) -> None:
    """Raise InvalidInput if the cache has no room for a row of `length` tokens."""
    least = whole_cache_bytes(1, length, sizes, tp)
    if cache_bytes is not None and cache_bytes < least:
        right = f"at least {gib_above(least):g}, for a row of {length} tokens"
        raise InvalidInput(f"{field}.cache_gib", cache_bytes / GIB, right)


def in_flight(rows: float, cache_bytes: int | None, workload: Workload, sizes: ModelSizes, tp: int) -> InFlight:
    """Return how many of a replica's rows a cache of `cache_bytes` per device keeps in flight; None means all.

    >>> from prefect_rlhf.placement.models.known_models import known_shape
    >>> sizes, long_rows = ModelSizes.of_shape(known_shape("llama-7b")), Workload.fixed(512, 512)
    >>> in_flight(64, whole_cache_bytes(16, 1024, sizes, 1), long_rows, sizes, 1)
    InFlight(first=16.0, later=16.0)
    """
    if cache_bytes is None:
        return InFlight(rows, rows)
    room = (cache_bytes // block_bytes(sizes, tp) - NULL_BLOCKS) * CACHE_BLOCK
    tokens = _tokens_of_a_row(workload)
    first = min(rows, max(1.0, room / tokens.first))
    return InFlight(first, min(first, max(1.0, room / tokens.later)))


def mean_context(workload: Workload) -> float:
    """Return a row's mean length in tokens, over the decoding steps of all rows."""
    steps = token_steps = 0.0
    for first, end, running in workload.responses.still_running():
        steps += running * (end - first)
        token_steps += running * (end - first) * (first + end) / 2
    return workload.prompts.mean + token_steps / max(1.0, steps)


@lru_cache(maxsize=256)
def _tokens_of_a_row(workload: Workload) -> InFlight:
    """Expected tokens in the cache, for each row in flight.

    Of rows that begin together at their fullest moment, when some have ended; later on average over a row's time, but
    no less.
    """
    prompt = workload.prompts.mean
    totals = [running * _blocks(prompt + end) for _, end, running in workload.responses.still_running()]
    fullest = max(1.0, prompt, *(CACHE_BLOCK * blocks for blocks in totals))
    return InFlight(fullest, max(fullest, mean_context(workload)))


def _blocks(length: float) -> int:
    return -int(-length // CACHE_BLOCK)
