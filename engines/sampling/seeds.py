"""Seeds from a row's identity, so that its random numbers do not depend on the device or the batch that draws them."""

from hashlib import blake2b

from prefect_rlhf.engines.commands import CallCommand


def play_seed(row_seed: int, turn: int) -> int:
    """Return a seed for a row's turn. At turn 0 it is the row's own, so a play of one turn is a generate without play.

    >>> play_seed(7, 0), play_seed(7, 1) != play_seed(7, 2)
    (7, True)
    """
    return _hashed(row_seed, turn) if turn else row_seed


def group_seeds(command: CallCommand) -> list[int]:
    """Return a seed for each row of a generate, equal for all rows from the same prompt, in all calls of a step.

    In an evaluation it is the same at every step.
    """
    before = -1 if command.call.every is not None else _steps_before(command)
    return [_hashed(command.seed, "group", before, row_id) for row_id in command.row_ids]


def row_seeds(command: CallCommand) -> list[int]:
    """Return a seed of 63 bits for each row of a generate.

    It is a hash of the run's seed, the steps before, the dataset's row, the sample, and the name of the call's stream.
    """
    call, before = command.call, _steps_before(command)
    return [
        _hashed(command.seed, before, row_id, row % call.rows.rows_per_item, call.draws)
        for row, row_id in zip(command.rows, command.row_ids, strict=True)
    ]


def _steps_before(command: CallCommand) -> int:
    """Return the number of steps before a call: an evaluation comes at the end of its step."""
    return command.step - 1 if command.call.every is None else command.step


def _hashed(*meaning: object) -> int:
    digest = blake2b(" ".join(map(str, meaning)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
