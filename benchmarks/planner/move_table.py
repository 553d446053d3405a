"""Durations of the moves of a closed problem: a table of text keys, of which there can be millions, as arrays."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import islice

import numpy as np

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.placement.devices.strategy import Strategy
from prefect_rlhf.placement.search.compiled import Ints

LONGEST_US = 1e12  # eleven days: iterations of such calls still fit into 64 bits
DEGREE_BITS = 21  # of each of pp, tp and dp in the number of a layout
AT_ONCE = 1_000_000  # keys
KEY = re.compile(r"\d+(?:,\d+){6}", re.ASCII)
LINE_END, COMMA, ZERO, NINE = 10, 44, 48, 57


def moves_between(table: Mapping[str, float], strategies: Mapping[int, Iterable[Strategy]]) -> dict[int, Moves]:
    """Read the moves of each size key between its `strategies`, from keys `size,pp,tp,dp,pp,tp,dp`.

    Raises InvalidInput for another key, or a value that is no duration.
    """
    moves_of_size = {size: Moves(ends) for size, ends in strategies.items()}
    entries = iter(table.items())
    while part := dict(islice(entries, AT_ONCE)):
        numbers, microseconds = _parsed(part)
        for size, moves in moves_of_size.items():
            of_size = numbers[:, 0] == size
            moves.add(numbers[of_size], microseconds[of_size])
    return moves_of_size


class Moves:
    """Microseconds between any two of some strategies; 0 where the table names none, and between equal ones."""

    def __init__(self, strategies: Iterable[Strategy]) -> None:
        self._layouts = np.unique(_layouts(strategies))
        self._microseconds = np.zeros((len(self._layouts),) * 2, dtype=np.int64)

    def add(self, numbers: Ints, microseconds: Ints) -> None:
        """Fill in `numbers[key, 7]`, as in the key; those of other strategies are left out."""
        in_range = (numbers[:, 1:] < 1 << DEGREE_BITS).all(axis=1)
        source, target = (self._places(_pack(numbers[in_range, at : at + 3])) for at in (1, 4))
        is_move = (source >= 0) & (target >= 0) & (source != target)
        self._microseconds[source[is_move], target[is_move]] = microseconds[in_range][is_move]

    def between(self, sources: Iterable[Strategy], targets: Iterable[Strategy]) -> Ints:
        """Microseconds as [source, target], for strategies that the table was made for."""
        rows, columns = self._places(_layouts(sources)), self._places(_layouts(targets))
        return self._microseconds[np.ix_(rows, columns)]

    def _places(self, layouts: Ints) -> Ints:
        places = np.minimum(np.searchsorted(self._layouts, layouts), len(self._layouts) - 1)
        return np.where(self._layouts[places] == layouts, places, -1)


def _layouts(strategies: Iterable[Strategy]) -> Ints:
    return _pack(np.array([(s.pp, s.tp, s.dp) for s in strategies], dtype=np.int64).reshape(-1, 3))


def _pack(degrees: Ints) -> Ints:
    """Pack pp, tp and dp, `degrees[..., 3]`, into one number."""
    pp, tp, dp = degrees[:, 0], degrees[:, 1], degrees[:, 2]
    return (pp << 2 * DEGREE_BITS) | (tp << DEGREE_BITS) | dp


def _parsed(entries: Mapping[str, float]) -> tuple[Ints, Ints]:
    """The numbers of each key, [keys, 7], and its microseconds."""
    lines = "\n".join(entries) + "\n"
    if not _all_are_keys(lines, len(entries)):
        wrong = next(key for key in entries if not KEY.fullmatch(key))
        raise InvalidInput("realloc.table_us", wrong, "a key size,pp,tp,dp,pp,tp,dp")
    if not _all_are_durations(entries.values()):
        key = next(key for key, value in entries.items() if not _all_are_durations([value]))
        raise InvalidInput(f"realloc.table_us[{key}]", entries[key], f"microseconds, 0 to {LONGEST_US:.0e}")
    numbers = np.fromstring(lines.replace("\n", ","), dtype=np.int64, sep=",").reshape(-1, 7)
    return numbers, np.rint(np.fromiter(entries.values(), np.float64, len(entries))).astype(np.int64)


def _all_are_keys(lines: str, count: int) -> bool:
    """Whether each of `count` lines is seven numbers with commas between."""
    if not lines.isascii():
        return False
    characters = np.frombuffer(lines.encode(), dtype=np.uint8)
    is_digit = (characters >= ZERO) & (characters <= NINE)
    separators = np.flatnonzero(~is_digit)
    if len(separators) != 7 * count or separators[0] == 0 or (np.diff(separators) == 1).any():
        return False
    kinds = characters[separators].reshape(count, 7)
    return bool((kinds[:, :6] == COMMA).all() and (kinds[:, 6] == LINE_END).all())


def _all_are_durations(values: Collection[float]) -> bool:
    return set(map(type, values)) <= {int, float} and all(0 <= value < LONGEST_US for value in values)
