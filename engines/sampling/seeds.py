"""Seeds by meaning: the numbers a row is drawn with depend on what it is, never on where it runs."""

from __future__ import annotations

from hashlib import blake2b

from prefect_rlhf.engines.commands import CallCommand


def row_seeds(command: CallCommand) -> list[int]:
    """Return a seed of 63 bits for each row of a generate: from run's seed, step, the dataset's row and sample."""
    seeds = []
    for row, row_id in zip(command.rows, command.row_ids, strict=True):
        meaning = command.seed, command.step, row_id, row % command.call.rows.rows_per_item
        digest = blake2b(" ".join(map(str, meaning)).encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little") >> 1)
    return seeds
