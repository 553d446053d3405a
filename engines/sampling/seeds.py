"""Seeds from the identity of a row: its random numbers do not depend on the device or the batch that draws them."""

from hashlib import blake2b

from prefect_rlhf.engines.commands import CallCommand


def row_seeds(command: CallCommand) -> list[int]:
    """Return a seed of 63 bits for each row of a generate.

    It is a hash of the run's seed, the step, the dataset's row, the sample, and the name of the call's stream.
    """
    seeds = []
    call, stream = command.call, (command.call.draws,) if command.call.draws else ()
    for row, row_id in zip(command.rows, command.row_ids, strict=True):
        meaning = command.seed, command.step, row_id, row % call.rows.rows_per_item, *stream
        digest = blake2b(" ".join(map(str, meaning)).encode(), digest_size=8).digest()
        seeds.append(int.from_bytes(digest, "little") >> 1)
    return seeds
