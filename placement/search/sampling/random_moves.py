"""Random numbers, compiled. The state is an array, so that a search can stop and continue."""

from __future__ import annotations

from prefect_rlhf.placement.search.compiled import Ints, inner

PROPOSALS_A_STEP = 2_000  # of a search by random moves: some ten milliseconds
MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407  # Knuth's MMIX, modulo 2^64


@inner
def next_31_bits(state: Ints) -> int:
    """The upper bits of a linear congruential generator."""
    state[0] = state[0] * MULTIPLIER + INCREMENT
    return (state[0] >> 33) & 0x7FFFFFFF


@inner
def below(state: Ints, count: int) -> int:
    """Draw a number from 0 to count - 1."""
    return next_31_bits(state) % count


@inner
def fraction(state: Ints) -> float:
    """Draw a number above 0, at most 1."""
    return (next_31_bits(state) + 1) / 2147483648.0
