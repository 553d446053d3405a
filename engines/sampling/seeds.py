"""Randomness by meaning: what a row is drawn with depends on what it is, never on where it runs."""

from __future__ import annotations

from hashlib import blake2b

from prefect_rlhf.engines.commands import CallCommand


def row_seeds(command: CallCommand) -> list[int]:
    """A seed of 63 bits for each row of a generate: from the run's seed, the step, the dataset's row and the sample."""
    samples = (row % command.samples_per_prompt for row in command.rows)
    rows = zip(command.row_ids, samples, strict=True)
    return [_seed(command.seed, command.step, row_id, sample) for row_id, sample in rows]


def _seed(*meaning: int) -> int:
    digest = blake2b(" ".join(map(str, meaning)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
