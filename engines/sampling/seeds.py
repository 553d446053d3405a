"""Seeds from the identity of a row: its random numbers do not depend on the device or the batch that draws them."""

from hashlib import blake2b

from prefect_rlhf.engines.commands import CallCommand


def play_seed(row_seed: int, turn: int) -> int:
    """Return the seed of a turn of a row: the row's own of turn 0, so that a play of a turn is a generate without play.

    >>> play_seed(7, 0), play_seed(7, 1) != play_seed(7, 2)
    (7, True)
    """
    return _hashed(row_seed, turn) if turn else row_seed


def group_seeds(command: CallCommand) -> list[int]:
    """Return a seed for each row of a generate that is equal for all rows made of a prompt, in all calls of a step.

    In an evaluation it is the same at every step.
    """
    step = -1 if command.call.every is not None else command.step
    return [_hashed(command.seed, "group", step, row_id) for row_id in command.row_ids]


def row_seeds(command: CallCommand) -> list[int]:
    """Return a seed of 63 bits for each row of a generate.

    It is a hash of the run's seed, the step, the dataset's row, the sample, and the name of the call's stream.
    """
    seeds = []
    call, stream = command.call, (command.call.draws,) if command.call.draws else ()
    for row, row_id in zip(command.rows, command.row_ids, strict=True):
        meaning = command.seed, command.step, row_id, row % call.rows.rows_per_item, *stream
        seeds.append(_hashed(*meaning))
    return seeds


def _hashed(*meaning: object) -> int:
    digest = blake2b(" ".join(map(str, meaning)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
